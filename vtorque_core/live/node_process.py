"""Public: a plugin's one process for all jobs of a node, and one of its without rights."""

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
from vtorque_core.api.daemon_process import Process
from vtorque_core.base import safefs
from vtorque_core.base._launch import die_with
from vtorque_core.base.errors import HostFault
from vtorque_core.base.locks import flocked
from vtorque_core.base.names import Paths

if TYPE_CHECKING:
    from vtorque_core.api.node_job import NodeJob

_PR_SET_NO_NEW_PRIVS = 38  # prctl(2)
_STARTING = 10  # nice value until it begins
_THREADS, _MEMORY = 128, 1 << 30  # of one that has given up its rights
LOG_BYTES = 256 * 1024  # of each of two files
_ENVIRON = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C", "HOME": "/root"}


@dataclass(frozen=True)
class NodeProcess(Process):
    """Started by the first job that wants it, ended with the last; root.

    It is ``python -m`` of ``module``, whose ``main`` calls :func:`begin`; the subclass stands
    elsewhere, since no job's hook needs that program. A node has one, known by its lock
    ``<run>/<name>.lock`` alone: settings change with the next one.

    Every job waits for its start, so it is spawned, which copies none of our memory: 1 ms, and
    is nice until it begins. It inherits its standard input, the lock file with our lock
    (flock(2)), and so has it at once.
    """

    scope: ClassVar = "node"
    name: ClassVar[str]
    module: ClassVar[str]
    argv: tuple[str, ...] = unjournalled(("process of the node",))
    lock: str = ""

    @classmethod
    def of(cls, paths: Paths, *words: Path | float) -> Self:
        """Return that of a node; ``words``: what its ``main`` gets beside where the files are."""
        arguments = (str(word) for word in (paths.state, paths.run, *words))
        argv = (sys.executable, "-I", "-m", cls.module, *arguments)
        return cls(argv, lock=str(paths.run / f"{cls.name}.lock"))

    def create(self) -> None:
        """Start it. Raises HostFault if it cannot be executed or the lock is taken."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        with (
            safefs.naming(f"{self.argv[0]}: lock {self.lock}"),
            safefs.closing(os.open(self.lock, flags, 0o600)) as lock,
        ):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            files: list[tuple[int, ...] | tuple[int, int, str, int, int]] = [
                (os.POSIX_SPAWN_DUP2, lock, 0),
                (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ]
            # what the caller has got from its batch system
            others = (int(entry.name) for entry in Path("/proc/self/fd").iterdir())
            files += [(os.POSIX_SPAWN_CLOSE, other) for other in others if other > 2]
            program = self.argv[0]
            pid = os.posix_spawn(program, self.argv, _ENVIRON, file_actions=files, setsid=True)
            _be_nice(pid, _STARTING)

    def _held(self, descriptor: int) -> bool:
        return not flocked(descriptor, fcntl.LOCK_SH, 0.0)

    def _holder(self, descriptor: int) -> int | None:
        """Return whose standard input has the lock: its own, even before its first line.

        Told by the kernel (fdinfo, proc(5)): a look at the file itself would wait for the file
        systems of whoever runs here.
        """
        file = os.fstat(descriptor)
        device = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}"
        end = time.monotonic() + RELEASE_TIME
        while self._held(descriptor):
            if time.monotonic() > end:
                raise HostFault(f"lock {self.lock}: held by a process that cannot be found")
            for process in Path("/proc").glob("[0-9]*"):
                with contextlib.suppress(OSError):
                    if f" {device}:{file.st_ino} " in (process / "fdinfo/0").read_text():
                        return int(process.name)
        return None

    @classmethod
    def start(cls, job: NodeJob, without: str) -> None:
        """Start that of a job's node with the site's config, unless another job has. Never waits.

        A fault (a full /run) is no reason for the job to fail: it is warned what it is ``without``.
        """
        try:
            job.acquire(cls.of(job.site.paths, job.site.path))
        except HostFault as error:
            job.warn(f"{without}: {error}")


def _be_nice(pid: int, value: int) -> None:
    """Set a process's nice value, and its session's, which counts where there is one (sched(7))."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, value)
        Path(f"/proc/{pid}/autogroup").write_text(str(value))


def begin(name: str, nice: int = 0) -> tuple[Paths, list[str]]:
    """Begin such a process: what it logs is in ``<state>/<name>.log``, its files are root's alone.

    ``nice``: its value from now on, and its session's. Returns where the node's files are, and the
    words that it was given. Raises OSError.
    """
    import logging  # noqa: PLC0415 - not by who starts it
    from logging.handlers import RotatingFileHandler  # noqa: PLC0415

    state, run, *words = sys.argv[1:]
    os.umask(0o077)
    os.chdir("/")
    _be_nice(os.getpid(), nice)
    ctypes.CDLL(None).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    handler = RotatingFileHandler(Path(state, f"{name}.log"), maxBytes=LOG_BYTES, backupCount=1)
    logging.basicConfig(level="INFO", format="%(asctime)s %(message)s", handlers=[handler])
    return Paths(Path(state), Path(run)), words


def become(uid: int, largest: int = 0) -> None:
    """Have no rights any more, in all threads (setresuid(2), "C library/kernel differences").

    Called as root by what such a process starts (:func:`vtorque_core.api.guarded`) to talk to
    strangers, once that has opened what needs root: it cannot get new rights, has at most 1 GiB of
    memory, with all of its uid 128 threads, and ends with its parent.

    Args:
        uid: whom it becomes; it needs no account.
        largest: bytes that a file which it writes may have.

    Raises OSError.
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
    # the kernel has forgotten this with the uid
    die_with(parent)
