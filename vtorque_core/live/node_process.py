"""Run a plugin's process for all jobs of a node, and drop privileges in its children."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import resource
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self

from vtorque_core.api.acquired import RELEASE_TIME, unjournalled
from vtorque_core.api.daemon_process import DaemonProcess
from vtorque_core.base import safefs
from vtorque_core.base._launch import die_with
from vtorque_core.base.errors import HostFault
from vtorque_core.base.locks import try_flock
from vtorque_core.base.names import Paths

if TYPE_CHECKING:
    from vtorque_core.api.node_job import NodeJob

_PR_SET_NO_NEW_PRIVS = 38  # prctl(2)
_STARTING = 10  # nice value until initialize()
_THREADS, _MEMORY = 128, 1 << 30  # limits of switch_user()
LOG_BYTES = 256 * 1024  # of each of two files
_ENVIRON = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C", "HOME": "/root"}


@dataclass(frozen=True)
class NodeProcess(DaemonProcess):
    """A root process that the first job on a node starts, and that ends with the last job.

    A subclass sets ``name``, and ``module`` with a ``main`` that calls :func:`initialize`. Define
    the subclass outside ``module``, so that hooks need not import ``module``.

    A node has one process of each ``name``, with the lock ``<run>/<name>.lock``. A running process
    ignores changed settings.
    """

    scope: ClassVar = "node"
    name: ClassVar[str]
    module: ClassVar[str]
    argv: tuple[str, ...] = unjournalled(("process of the node",))
    lock: str = ""

    @classmethod
    def for_node(cls, paths: Paths, *words: Path | float) -> Self:
        """Return the process of a node; ``words`` are further arguments for its ``main``."""
        arguments = (str(word) for word in (paths.state, paths.run, *words))
        argv = (sys.executable, "-I", "-m", cls.module, *arguments)
        return cls(argv, lock=str(paths.run / f"{cls.name}.lock"))

    def create(self) -> None:
        """Start the process."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        with (
            safefs.name_errors(f"{self.argv[0]}: lock {self.lock}"),
            safefs.closing(os.open(self.lock, flags, 0o600)) as lock,
        ):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            files: list[tuple[int, ...] | tuple[int, int, str, int, int]] = [
                (os.POSIX_SPAWN_DUP2, lock, 0),
                (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ]
            # descriptors that the caller has inherited from its batch system
            others = (int(entry.name) for entry in Path("/proc/self/fd").iterdir())
            files += [(os.POSIX_SPAWN_CLOSE, other) for other in others if other > 2]
            program = self.argv[0]
            pid = os.posix_spawn(program, self.argv, _ENVIRON, file_actions=files, setsid=True)
            _set_nice(pid, _STARTING)

    def _is_locked(self, descriptor: int) -> bool:
        return not try_flock(descriptor, fcntl.LOCK_SH, 0.0)

    def _holder(self, descriptor: int) -> int | None:
        file = os.fstat(descriptor)
        device = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}"
        end = time.monotonic() + RELEASE_TIME
        while self._is_locked(descriptor):
            if time.monotonic() > end:
                raise HostFault(f"lock {self.lock} is held by a process that cannot be found")
            for process in Path("/proc").glob("[0-9]*"):
                with contextlib.suppress(OSError):
                    if f" {device}:{file.st_ino} " in (process / "fdinfo/0").read_text():
                        return int(process.name)
        return None

    @classmethod
    def start(cls, job: NodeJob, without: str) -> None:
        """Start the process with the site's config, unless it already runs. Does not wait for it.

        If the start fails, warns the user and the admin: ``without`` names what the job lacks.
        """
        try:
            job.acquire(cls.for_node(job.site.paths, job.site.path))
        except HostFault as error:
            job.warn(f"{without}: {error}")


def _set_nice(pid: int, value: int) -> None:
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, value)
        Path(f"/proc/{pid}/autogroup").write_text(str(value))


def initialize(name: str, nice: int = 0) -> tuple[Paths, list[str]]:
    """Initialize the process ``name``. It logs to ``<state>/<name>.log``; its umask is 077.

    Returns the site's paths, and further arguments (:meth:`NodeProcess.for_node`). Raises OSError.
    """
    import logging  # noqa: PLC0415 - for this process, not for the hook that starts it
    from logging.handlers import RotatingFileHandler  # noqa: PLC0415 - as above

    state, run, *words = sys.argv[1:]
    os.umask(0o077)
    os.chdir("/")
    _set_nice(os.getpid(), nice)
    ctypes.CDLL(None).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    handler = RotatingFileHandler(Path(state, f"{name}.log"), maxBytes=LOG_BYTES, backupCount=1)
    logging.basicConfig(level="INFO", format="%(asctime)s %(message)s", handlers=[handler])
    return Paths(Path(state), Path(run)), words


def switch_user(uid: int, largest: int = 0) -> None:
    """Drop all privileges in all threads (setresuid(2), "C library/kernel differences").

    Call it as root in a child (:func:`vtorque_core.api.guard_command`) that talks to untrusted
    peers. The process cannot regain privileges, has at most 1 GiB of memory and 128 threads per
    uid, and dies with its parent. ``largest`` limits written files in bytes. Raises OSError.
    """
    parent = os.getppid()
    resource.setrlimit(resource.RLIMIT_NPROC, (_THREADS, _THREADS))
    resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY, _MEMORY))
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    # the change of uid has reset this
    die_with(parent)
