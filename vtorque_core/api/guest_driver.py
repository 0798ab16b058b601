"""What a guest type implements: how its guests are built, awaited, and run a job."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from vtorque_core.api.acquired import Resource
from vtorque_core.api.guest_context import ContextItem
from vtorque_core.api.guest_plan import GuestPlan
from vtorque_core.api.libvirt_domain import Element, Single
from vtorque_core.api.node_job import Site
from vtorque_core.base import safefs
from vtorque_core.base.errors import HostFault, Refused

ORDER_SOCKET = "order.sock"
"""In the first guest's run directory; the job's user may connect. See :class:`LateDriver`."""

LEAVE, TELL, LEFT = "leave.fifo", "tell.fifo", "left"
"""In the first guest's run directory: FIFOs, for the job shell of a guest that is being saved and
ends, or goes on; a file, for that of one that was saved. See :class:`LeavableDriver`."""

MAX_ORDER = 1 << 18  # bytes
_MAX_GUESTS = 250  # descriptors in one message: below SCM_MAX_FD (unix(7))


@dataclass(frozen=True)
class ReadyGuest:
    """A guest that root has proven ready, as the job shell reads it from the proof file."""

    name: str
    hostname: str
    rank: int
    run_dir: Path
    image: str = ""


@dataclass(frozen=True)
class Script:
    """The job script and how the batch system would have started it, all as the user's data.

    Args:
        name: its base name as the batch system has it.
        content: its bytes.
        interpreter: the ``-S`` shell, or None: the script's own ``#!`` line, else the login shell.
        login: the batch system starts that shell, or without one the user's, as a login shell, and
            the script is a command of its.
        args: the script's arguments.
        environ: the exact environment of the script.
        cwd: working directory inside the guest.
        umask: file mode creation mask.
        limits: RLIMIT name (``"NOFILE"``) to (soft, hard); -1 is unlimited.
        merge: stdout and stderr are one stream (``-j oe``).
        grace: seconds between TERM and KILL when the job is ended from outside.
        prologue, epilogue: the user's ``vm_prologue``/``vm_epilogue``; a failing one fails the job.
    """

    name: str
    content: bytes
    environ: Mapping[str, str]
    cwd: str
    interpreter: str | None = None
    login: bool = False
    args: Sequence[str] = ()
    umask: int = 0o077
    limits: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    merge: bool = False
    grace: float = 10.0
    prologue: bytes | None = None
    epilogue: bytes | None = None
    interactive: bool = False


@dataclass(frozen=True)
class Streams:
    """The job shell's file descriptors. ``terminal``: stdin is a tty and becomes one inside."""

    stdin: int | None
    stdout: int
    stderr: int
    terminal: bool = False


class GuestDied(Exception):
    """The guest ended, or its stream broke, while something ran in it."""


class GuestDriver(Protocol):
    """One per guest type, made by ``GuestType.driver()``; stateless."""

    def elements(self, guest: GuestPlan, site: Site) -> Iterable[Element]:
        """Return the virtual hardware this kind of guest needs. Pure; root on the node.

        The core brings the job's overlay disk (if the image has a disk), NICs, rng, console.
        """

    def context(self, guest: GuestPlan, site: Site) -> Iterable[ContextItem]:
        """Return the guest type's own context items (mounts of its shares, ...). Pure."""

    def resources(
        self, guest: GuestPlan, items: Sequence[ContextItem], site: Site
    ) -> Iterable[Resource]:
        """Return what must exist before the domain starts, e.g. the seed. The core acquires it."""

    def await_ready(self, guest: GuestPlan, deadline: float, step: Callable[[str], None]) -> None:
        """Wait, as root, until the guest proves that its context is applied.

        ``deadline`` is in ``time.monotonic()`` seconds; ``step`` is told each stage seen.
        Raises HostFault naming the stage and reason; Refused if the user's own part failed.
        """

    def run(self, guest: ReadyGuest, script: Script, streams: Streams) -> int:
        """Run the script inside, in the job shell, as the job's user on the host.

        Forwards SIGTERM, SIGINT, SIGHUP, SIGUSR1/2, SIGCONT and SIGTSTP; returns the exit code
        (128+n for a signal). Raises GuestDied.
        """


@runtime_checkable
class LateDriver(GuestDriver, Protocol):
    """A driver whose guests are told at boot what to run, and so boot when the script comes.

    The prologue then acquires everything but the domains, and leaves a process of root's that
    waits for one order on :data:`ORDER_SOCKET`. The driver's ``run``, in the job shell, sends it
    with :func:`boot_guests`.
    """

    def late(
        self, guest: GuestPlan, items: Sequence[ContextItem], order: bytes, site: Site
    ) -> Iterable[Single | Resource]:
        """Return what the order adds to the guest's elements and resources. Pure; as root.

        ``order`` is the job's user's text, to be trusted with nothing. Raises Refused.
        """


@runtime_checkable
class SpareDriver(GuestDriver, Protocol):
    """A driver whose guests can be booted before there is a job, and wait for its devices."""

    def await_spare(self, guest: GuestPlan, deadline: float) -> None:
        """Wait, as root, until the guest waits for what the driver brings for a job (its seed).

        Of the devices that are plugged in later that is the last. Raises HostFault.
        """


@runtime_checkable
class ClockDriver(GuestDriver, Protocol):
    """A driver whose guests can be told what time it is, after they have stood still."""

    def set_clock(self, run_dir: Path, deadline: float) -> None:
        """Have a guest set its clock, as root, until a time.monotonic(). Raises HostFault."""


@runtime_checkable
class LeavableDriver(GuestDriver, Protocol):
    """A driver whose job shell can leave a script that runs, and another one go on with it.

    When the connection to the guest breaks, and root has made :data:`LEAVE`, ``run`` writes to it
    what the other one needs, a line of the user's after another line's end, so that half of it is
    none, until the FIFO is gone; then it ends. Where there is :data:`LEFT`, which has this line, it
    goes on with the script that runs.

    If root has made :data:`TELL` before it calls ``expect_break``, ``run`` writes the same to that
    when root reads it, which is while the guest stands still, and goes on. An empty line: what runs
    is not the script, and could not be left.
    """

    def expect_break(self, run_dir: Path, seconds: int, deadline: float) -> None:
        """Have a guest and its job shell wait for each other if their connection breaks. As root.

        For so many seconds; 0: no longer. Raises HostFault if the guest does not say until a
        time.monotonic() that it will.
        """


@dataclass(frozen=True)
class BootedGuest:
    """A guest that the order has booted; ``console`` is a descriptor, connected to its console."""

    hostname: str
    rank: int
    console: int


def boot_guests(guest: ReadyGuest, order: bytes) -> list[BootedGuest]:
    """Have root boot the job's guests of this node; return them by rank. In the job shell.

    Raises Refused or HostFault with root's reason; nothing has run then.
    """
    path = guest.run_dir / ORDER_SOCKET
    if len(order) > MAX_ORDER:
        raise Refused(f"script and environment have more than {MAX_ORDER >> 10} KiB")
    with safefs.naming(path), socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
        connection.sendall(order)
        connection.shutdown(socket.SHUT_WR)
        data, consoles, _, _ = socket.recv_fds(connection, 1 << 16, _MAX_GUESTS)
        while part := connection.recv(1 << 16):
            data += part
    answer = json.loads(data or b'{"fault": "it ended without an answer"}')
    if "guests" not in answer:
        for descriptor in consoles:
            os.close(descriptor)
        if "refused" in answer:
            raise Refused(answer["refused"])
        raise HostFault(answer["fault"], detail=tuple(answer.get("detail", ())))
    return [
        BootedGuest(str(each["hostname"]), int(each["rank"]), console)
        for each, console in zip(answer["guests"], consoles, strict=True)
    ]
