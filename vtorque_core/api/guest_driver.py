"""Interface of a guest type."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from vtorque_core.api.acquired import Resource
from vtorque_core.base import safefs
from vtorque_core.base.errors import HostFault, Refused

if TYPE_CHECKING:
    from vtorque_core.api.guest_context import ContextItem
    from vtorque_core.api.guest_plan import GuestPlan
    from vtorque_core.api.libvirt_domain import Element, Single
    from vtorque_core.api.node_job import Site

ORDER_SOCKET = "order.sock"
"""Socket in the first guest's run directory; see :class:`LateDriver`."""

LEAVE, TELL, LEFT = "leave.fifo", "tell.fifo", "left"
"""FIFOs and a file in the first guest's run directory; see :class:`DetachableDriver`."""

MAX_ORDER = 1 << 18  # bytes
_MAX_GUESTS = 250  # descriptors in one message: below SCM_MAX_FD (unix(7))


@dataclass(frozen=True)
class ReadyGuest:
    """A ready guest, as the proof describes it."""

    name: str
    hostname: str
    rank: int
    run_dir: Path
    image: str = ""


@dataclass(frozen=True)
class Script:
    """The job script, and the settings with which the batch system would start it. Untrusted.

    Attributes:
        interpreter: the shell of ``-S``. None: the program of the ``#!`` line; if the script has no
            such line, the login shell.
        login: the batch system feeds the script to a login shell.
        limits: (soft, hard) by RLIMIT name (``"NOFILE"``); -1 is unlimited.
        merge: stdout and stderr are one stream (``-j oe``).
        grace: seconds between SIGTERM and SIGKILL.
        prologue, epilogue: scripts of the ``-vm`` keys ``vm_prologue`` and ``vm_epilogue``. If a
            script fails, the job fails.
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
    """The job shell's file descriptors. ``terminal``: stdin is a tty, and the script gets a tty."""

    stdin: int | None
    stdout: int
    stderr: int
    terminal: bool = False


class GuestDied(Exception):
    """The guest ended, or its connection broke, while a script ran in it."""


class GuestDriver(Protocol):
    """Driver of a guest type. Stateless. Root calls all methods except :meth:`run`."""

    def elements(self, guest: GuestPlan, site: Site) -> Iterable[Element]:
        """Return the virtual hardware that this guest type needs, without side effects.

        The core adds the image's disk, NICs, rng and console.
        """

    def context(self, guest: GuestPlan, site: Site) -> Iterable[ContextItem]:
        """Return the guest type's own context items, without side effects."""

    def resources(
        self, guest: GuestPlan, items: Sequence[ContextItem], site: Site
    ) -> Iterable[Resource]:
        """Return resources that the core acquires before the domain starts."""

    def await_ready(self, guest: GuestPlan, deadline: float, step: Callable[[str], None]) -> None:
        """Wait until the guest reports that its context items are applied.

        ``deadline`` is in ``time.monotonic()`` seconds. Call ``step`` with the name of each stage.

        Raises HostFault if a stage fails or exceeds the deadline, Refused if a context item that
        the user requested fails.
        """

    def run(self, guest: ReadyGuest, script: Script, streams: Streams) -> int:
        """Run the script in the guest, from the job shell, as the job's owner.

        Forwards SIGTERM, SIGINT, SIGHUP, SIGUSR1, SIGUSR2, SIGCONT and SIGTSTP. Returns the exit
        status, or 128+n for signal n. Raises GuestDied.
        """


@runtime_checkable
class LateDriver(GuestDriver, Protocol):
    """A driver whose guests can boot only once the script is known.

    A root process waits on :data:`ORDER_SOCKET` until ``run`` orders it to boot the guests
    (:func:`boot_guests`).
    """

    def late_items(
        self, guest: GuestPlan, items: Sequence[ContextItem], order: bytes, site: Site
    ) -> Iterable[Single | Resource]:
        """Return the elements and resources that ``order`` adds. As root, without side effects.

        ``order`` is the job shell's order to boot, and untrusted. Raises Refused if it is invalid.
        """


@runtime_checkable
class WarmDriver(GuestDriver, Protocol):
    """A driver whose guests can boot before a job exists and wait for the job's devices."""

    def await_warm(self, guest: GuestPlan, deadline: float) -> None:
        """Wait until the guest has booted and waits for a job's seed. As root.

        Raises HostFault at the deadline.
        """


@runtime_checkable
class ClockDriver(GuestDriver, Protocol):
    """A driver that can set the clock of a guest that was suspended."""

    def set_clock(self, run_dir: Path, deadline: float) -> None:
        """Set the clock of the guest with this run directory, as root.

        Raises HostFault after ``deadline`` (``time.monotonic()``).
        """


@runtime_checkable
class DetachableDriver(GuestDriver, Protocol):
    """A driver whose job shells can detach from a running script and attach to it again.

    The state of ``run`` is one line of text. Root requests the state by creating one of two FIFOs:

    - :data:`LEAVE`: when the connection to the guest breaks, ``run`` writes its state to this FIFO,
      repeatedly until root removes the FIFO. Then ``run`` ends.
    - :data:`TELL`: after :meth:`allow_disconnect`, ``run`` writes its state to this FIFO, and
      continues. An empty state means that ``run`` cannot detach.

    ``run`` writes a newline before and after the state. Root can therefore ignore the rest of an
    interrupted write. The state is untrusted. Root writes the state to the file :data:`LEFT`.
    Another ``run`` reads this file to attach to the script.
    """

    def allow_disconnect(self, run_dir: Path, seconds: int, deadline: float) -> None:
        """Let guest and job shell reconnect within ``seconds`` if their connection breaks. As root.

        With 0, a broken connection ends the job. Raises HostFault after ``deadline``
        (``time.monotonic()``).
        """


@dataclass(frozen=True)
class BootedGuest:
    """A guest that :func:`boot_guests` has booted. ``console`` is a descriptor of its console."""

    hostname: str
    rank: int
    console: int


def boot_guests(guest: ReadyGuest, order: bytes) -> list[BootedGuest]:
    """Boot the job's guests on this node, and return them in rank order. As the user.

    Raises Refused for an invalid ``order``, HostFault for a failed boot.
    """
    path = guest.run_dir / ORDER_SOCKET
    if len(order) > MAX_ORDER:
        raise Refused(f"script and environment are larger than {MAX_ORDER >> 10} KiB")
    with safefs.name_errors(path), socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
        connection.sendall(order)
        connection.shutdown(socket.SHUT_WR)
        data, consoles, _, _ = socket.recv_fds(connection, 1 << 16, _MAX_GUESTS)
        while part := connection.recv(1 << 16):
            data += part
    answer = json.loads(data or b'{"fault": "the process that boots guests ended without answer"}')
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
