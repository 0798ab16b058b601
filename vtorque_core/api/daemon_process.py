"""Resource: a daemon, identified by the process that holds its lock file."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from dataclasses import dataclass
from typing import ClassVar

from vtorque_core.api.acquired import RELEASE_TIME, CoreResource
from vtorque_core.api.children import wait_readable
from vtorque_core.base import _launch, safefs
from vtorque_core.base.errors import HostFault
from vtorque_core.base.locks import lock_holder, open_daemon_lock
from vtorque_core.base.run_tool import run_tool


@dataclass(frozen=True)
class DaemonProcess(CoreResource):
    """A root daemon that stays in the foreground and keeps inherited descriptors open.

    It runs in its own session, in ``/``, with a fixed environment, and must end its children.

    Attributes:
        lock: a lock file that only this daemon uses.
        log: file for its output; empty: discard it.
        grace: seconds between SIGTERM and SIGKILL.
    """

    kind = "process"
    blocking = True
    _launcher: ClassVar[tuple[str, ...]] = (str(_launch.__file__),)
    argv: tuple[str, ...]
    lock: str
    log: str = ""
    grace: float = 5.0

    def create(self) -> None:
        """Start the daemon. Raises HostFault if its lock is held."""
        started = (str(os.getpid()), self.lock, self.log, *self.argv)
        run_tool(sys.executable, "-I", "-S", *self._launcher, *started, timeout=10.0)

    def is_lost(self) -> bool:
        """Return True if no process holds the lock."""
        flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC
        with contextlib.suppress(OSError), safefs.closing(os.open(self.lock, flags)) as descriptor:
            return not self._is_locked(descriptor)
        return True

    def _is_locked(self, descriptor: int) -> bool:
        return lock_holder(descriptor) is not None

    def _holder(self, descriptor: int) -> int | None:
        return lock_holder(descriptor)

    def release(self) -> None:
        """Terminate the daemon, then remove the lock file."""
        end = time.monotonic() + RELEASE_TIME
        if (descriptor := open_daemon_lock(self.lock)) is None:
            return
        with safefs.closing(descriptor):
            self._end_holder(descriptor, end)
        safefs.remove_file(self.lock)

    def _end_holder(self, descriptor: int, end: float) -> None:
        while (pid := self._holder(descriptor)) is not None:
            with (
                contextlib.suppress(ProcessLookupError),
                safefs.closing(os.pidfd_open(pid)) as handle,
            ):
                if self._holder(descriptor) == pid:  # otherwise the pid may have been reused
                    self._end(handle, pid, end)

    def _end(self, handle: int, pid: int, end: float) -> None:
        signal.pidfd_send_signal(handle, signal.SIGTERM)
        if wait_readable([handle], min(self.grace, end - time.monotonic())):
            return
        signal.pidfd_send_signal(handle, signal.SIGKILL)
        if not wait_readable([handle], end - time.monotonic()):
            raise HostFault(
                f"{self.argv[0]} (pid {pid}) does not exit after SIGKILL; if it is in state D, its "
                "storage or a device hangs"
            )
