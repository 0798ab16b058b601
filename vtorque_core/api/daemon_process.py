"""Core kinds that run: process, virtiofsd, userdisk, domain.

None is remembered by its pid, which may be another process's by the time of the release: a
process is found by the lock it holds on a file, a domain by its UUID.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from vtorque_core import safefs, userdisk, virtiofs
from vtorque_core._userns_exec import lock_pid, lock_request
from vtorque_core.api_node import run_tool, unjournalled
from vtorque_core.detach import detached
from vtorque_core.errors import HostFault
from vtorque_core.resources import _launch
from vtorque_core.resources.files import CoreResource

_LAUNCH = str(Path(__file__).with_name("_launch.py"))
_ENVIRON = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C", "HOME": "/root"}
_STOP = 25.0  # seconds for one release; below the 30 that teardown gives it by default
_START = 10.0


@dataclass(frozen=True)
class Process(CoreResource):
    """A daemon that stays in the foreground and keeps its descriptors; ``lock`` is its own file.

    It ends its children itself. It runs as root, in its own session, in ``/``, with a fixed
    environment, its output in ``log`` (empty: nowhere). ``grace``: seconds between TERM and KILL.
    ``quick``: a subclass that holds up every job is started by a fork, in 3 ms instead of 40.
    """

    kind = "process"
    blocking = True
    quick: ClassVar[bool] = False
    argv: tuple[str, ...]
    lock: str
    log: str = ""
    grace: float = 5.0

    def create(self) -> None:
        """Start it. Raises HostFault if it cannot be executed or the lock is taken."""
        if self.quick:
            if problem := _launch.fork(self.lock, self.log, [*self.argv], _ENVIRON):
                raise HostFault(problem.decode("utf-8", "replace"))
            return
        launcher = (sys.executable, "-I", "-S", _LAUNCH, str(os.getpid()), self.lock, self.log)
        run_tool(*launcher, *self.argv, timeout=_START)

    def lost(self) -> bool:
        """Return whether nobody holds the lock."""
        try:
            descriptor = os.open(self.lock, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            return True
        try:
            return lock_holder(descriptor) is None
        finally:
            os.close(descriptor)

    def release(self) -> None:
        """End it: TERM, after the grace KILL, and wait until it has gone; then remove the lock."""
        end = time.monotonic() + _STOP
        try:
            descriptor = os.open(self.lock, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        except OSError as error:
            raise HostFault(f"lock {self.lock}: {error.strerror}") from error
        try:
            self._end_holder(descriptor, end)
        finally:
            os.close(descriptor)
        safefs.remove_file(self.lock)

    def _end_holder(self, descriptor: int, end: float) -> None:
        while (pid := lock_holder(descriptor)) is not None:
            with contextlib.suppress(ProcessLookupError):
                handle = os.pidfd_open(pid)
                try:
                    if lock_holder(descriptor) == pid:  # else the pid may be another's by now
                        self._end(handle, pid, end)
                finally:
                    os.close(handle)

    def _end(self, handle: int, pid: int, end: float) -> None:
        signal.pidfd_send_signal(handle, signal.SIGTERM)
        if _gone(handle, min(self.grace, end - time.monotonic())):
            return
        signal.pidfd_send_signal(handle, signal.SIGKILL)
        if not _gone(handle, end - time.monotonic()):
            raise HostFault(f"{self.argv[0]} (pid {pid}) was killed but does not end")


@dataclass(frozen=True)
class Starter(Process):
    """The process that boots a job's guests on the job shell's word: a fork of its prologue.

    ``work`` runs in it with what it calls as soon as its ``socket`` listens.
    """

    kind = "starter"
    argv: tuple[str, ...] = ("the starter of late guests",)
    lock: str = ""
    socket: str = ""
    work: Callable[[Callable[[], None]], int] | None = unjournalled(None)  # noqa: RUF009

    def create(self) -> None:
        """Fork it. Raises HostFault if it does not listen."""
        work = self.work
        if work is None:
            raise ValueError("a starter is created from its work")

        def locked(begun: Callable[[], None]) -> int:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            fcntl.lockf(os.open(self.lock, flags, 0o600), fcntl.LOCK_EX | fcntl.LOCK_NB)
            return work(begun)

        detached(locked)
        if not Path(self.socket).exists():
            raise HostFault(f"{self.argv[0]} does not listen on {self.socket}")


def lock_holder(descriptor: int) -> int | None:
    """Return the pid that holds a POSIX lock on the open file (fcntl(2), F_GETLK), or None."""
    return lock_pid(fcntl.fcntl(descriptor, fcntl.F_GETLK, lock_request(fcntl.F_WRLCK)))


def _gone(handle: int, seconds: float) -> bool:
    poller = select.poll()
    poller.register(handle, select.POLLIN)
    return bool(poller.poll(max(0, int(seconds * 1000))))


@dataclass(frozen=True)
class Virtiofsd(CoreResource):
    """The daemon of one share (:mod:`vtorque_core.virtiofs`), found by the share's lock file."""

    kind = "virtiofsd"
    blocking = True
    share: virtiofs.Share | None = unjournalled(None)  # noqa: RUF009 - a field, as in api_node
    lock: str = ""

    def __post_init__(self) -> None:
        """Take the lock's path from the share."""
        if self.share is not None:
            object.__setattr__(self, "lock", self.share.lock)

    def create(self) -> None:
        """Start the daemon; raises HostFault as :func:`vtorque_core.virtiofs.start`."""
        if self.share is None:
            raise ValueError("a virtiofsd is created from its share")
        virtiofs.start(self.share)

    def release(self) -> None:
        """End the daemon and remove its socket and lock."""
        virtiofs.stop(self.lock, time.monotonic() + _STOP)


@dataclass(frozen=True)
class UserDisk(CoreResource):
    """The daemon of a user's disk (:mod:`vtorque_core.userdisk`), found by its lock file."""

    kind = "userdisk"
    blocking = True
    disk: userdisk.DiskFile | None = unjournalled(None)  # noqa: RUF009 - a field, as in api_node
    lock: str = ""

    def __post_init__(self) -> None:
        """Take the lock's path from the disk."""
        if self.disk is not None:
            object.__setattr__(self, "lock", self.disk.lock)

    def create(self) -> None:
        """Start the daemon; raises as :func:`vtorque_core.userdisk.start`."""
        if self.disk is None:
            raise ValueError("a user's disk is created from its file")
        userdisk.start(self.disk)

    def release(self) -> None:
        """End the daemon, which frees the file for the next job; remove its socket and lock."""
        userdisk.stop(self.lock, time.monotonic() + _STOP)


@dataclass(frozen=True)
class Domain(CoreResource):
    """A transient libvirt domain; it needs every earlier record of its guest."""

    kind = "domain"
    blocking = True
    settle = 5.0
    name: str
    uuid: str
    uri: str
    xml: str = unjournalled("")
    paused: bool = unjournalled(default=False)

    def create(self) -> None:
        """Start it from the XML. Raises HostFault."""
        from vtorque_core import hypervisor  # noqa: PLC0415 - libvirt costs 22 ms

        hypervisor.create_domain(self.uri, self.xml, paused=self.paused)

    def release(self) -> None:
        """Destroy it and wait until it has gone; gone already is fine."""
        from vtorque_core import hypervisor  # noqa: PLC0415

        hypervisor.destroy_domain(self.uri, self.uuid, _STOP)
