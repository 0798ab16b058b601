"""Half of a driver: how root waits for a guest with the agent, and how the job in it runs.

The job shell is here for ``run`` alone, so what else is needed is imported where it is called.
"""

# ruff: noqa: PLC0415

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

from vtorque_core.api import HostFault, let_users, replace_file
from vtorque_core.api.guest_driver import ReadyGuest, Script, Streams
from vtorque_core.api.guest_plan import GuestPlan
from vtorque_linux_guest.guest.contract import BREAK_MARKER, STATUS_SOCKET
from vtorque_linux_guest.job import run_job


class AgentDriver:
    """All of a driver that goes through the ports of :func:`vtorque_linux_guest.api.ports`.

    Stateless. Its guests can be suspended, saved and moved, too: it is a ``ClockDriver`` and a
    ``LeavableDriver``.
    """

    def await_ready(self, guest: GuestPlan, deadline: float, step: Callable[[str], None]) -> None:
        """Wait until the guest's agent says READY; what a guest that fails has logged is kept.

        The job's owner may read its console from now on. As root; ``deadline`` is in
        time.monotonic() seconds. Raises HostFault: what the guest's setup said, that it died, or
        that it was silent.
        """
        from vtorque_linux_guest.job import ready

        _let_watch(guest.state_dir / "console.log", guest.user.uid)
        with status_port(guest.run_dir, deadline) as connection:
            ready.await_ready(guest, connection, deadline, step)

    def set_clock(self, run_dir: Path, deadline: float) -> None:
        """Have a guest that has stood still set its clock. As root. Raises HostFault."""
        from vtorque_linux_guest.job import ready

        with status_port(run_dir, deadline) as connection:
            ready.set_clock(connection, deadline)

    def expect_break(self, run_dir: Path, seconds: int, deadline: float) -> None:
        """Have a guest and its job shell wait for each other if their connection breaks. As root.

        Both for so many seconds from now, of the node's time and of the guest's own; 0: no longer.
        Raises HostFault if the guest does not say until ``deadline`` that it will.
        """
        from vtorque_linux_guest.job import ready

        with status_port(run_dir, deadline) as connection:
            ready.hold(connection, seconds, deadline)
        marker = str(run_dir / BREAK_MARKER)
        replace_file(marker, b"%d\n" % (time.time() + seconds), mode=0o444)

    def run(self, guest: ReadyGuest, script: Script, streams: Streams) -> int:
        """Run the job in the guest; see :func:`vtorque_linux_guest.job.run_job.run`."""
        return run_job.run(guest, script, streams)


def status_port(run_dir: Path, deadline: float) -> socket.socket:
    """Return a connection to a guest's status port. Raises HostFault if there is no guest."""
    path = run_dir / STATUS_SOCKET
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(max(0.1, deadline - time.monotonic()))
        connection.connect(str(path))
    except OSError as error:
        connection.close()
        raise HostFault(f"the guest died ({path}: {error.strerror or error})") from None
    return connection


def _let_watch(console: Path, uid: int) -> None:
    """Let the job's owner read a guest's console: what code of theirs, or its kernel, says there.

    It is virtlogd's file, made when the guest was started; when it has 2 MiB another one takes its
    place, which is root's alone. In a directory of root's. Best effort: some have no console log.
    """
    with contextlib.suppress(OSError):
        descriptor = os.open(console, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            let_users(descriptor, [uid], 6, 4)
        finally:
            os.close(descriptor)
