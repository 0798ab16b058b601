"""Base class of drivers for guests with the agent: wait until a guest is ready, run its job.

The job shell calls only ``run``, and root's hooks call only the other methods. Therefore each
method imports only the modules that it needs.
"""

# ruff: noqa: PLC0415

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path

from vtorque_core.api import HostFault, closing, let_users, replace_file
from vtorque_core.api.guest_driver import ReadyGuest, Script, Streams
from vtorque_core.api.guest_plan import GuestPlan
from vtorque_linux_guest.guest.contract import BREAK_MARKER, STATUS_SOCKET


class AgentDriver:
    """Base class of drivers for guests with the agent (:mod:`vtorque_linux_guest.api`).

    It is also a ``ClockDriver`` and a ``DetachableDriver``, so its guests can be suspended,
    checkpointed and migrated.
    """

    def __init__(self) -> None:
        """In the job shell, import the code of ``run`` early, while the guests are starting."""
        if os.geteuid() != 0:
            from vtorque_linux_guest.job import run_job  # noqa: F401 - root's hooks need none of it

    def await_ready(self, guest: GuestPlan, deadline: float, step: Callable[[str], None]) -> None:
        """Wait until the guest's agent reports READY. If the guest fails, keep its logs.

        Runs as root. First makes the guest's console log readable for the job's owner.
        ``deadline`` is in time.monotonic() seconds. Raises HostFault if the guest fails, Refused if
        the user's cloud-config or disk is the reason.
        """
        from vtorque_linux_guest.job import readiness

        _let_watch(guest.state_dir / "console.log", guest.user.uid)
        with status_port(guest.run_dir, deadline) as connection:
            readiness.await_ready(guest, connection, deadline, step)

    def set_clock(self, run_dir: Path, deadline: float) -> None:
        """Set the clock of a guest that was paused. Runs as root. Raises HostFault."""
        from vtorque_linux_guest.job import readiness

        with status_port(run_dir, deadline) as connection:
            readiness.set_clock(connection, deadline)

    def allow_disconnect(self, run_dir: Path, seconds: int, deadline: float) -> None:
        """Let a guest and its job shell reconnect if their connection breaks. Runs as root.

        They may reconnect for ``seconds`` from now. With 0, a broken connection ends the job.
        Raises HostFault if the guest does not confirm before ``deadline``.
        """
        from vtorque_linux_guest.job import readiness

        with status_port(run_dir, deadline) as connection:
            readiness.hold(connection, seconds, deadline)
        marker = str(run_dir / BREAK_MARKER)
        replace_file(marker, b"%d\n" % (time.time() + seconds), mode=0o444)

    def run(self, guest: ReadyGuest, script: Script, streams: Streams) -> int:
        """Run the job in the guest; see :func:`vtorque_linux_guest.job.run_job.run`."""
        from vtorque_linux_guest.job import run_job

        return run_job.run(guest, script, streams)


def status_port(run_dir: Path, deadline: float) -> socket.socket:
    """Return a connection to a guest's status port. Raises HostFault if the guest is gone."""
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
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    with contextlib.suppress(OSError), closing(os.open(console, flags)) as descriptor:
        let_users(descriptor, [uid], 6, 4)
