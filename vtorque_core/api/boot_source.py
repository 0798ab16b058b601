"""Boot sources, from which guests start. For acting modules (entry points ``vtorque1.node``)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from vtorque_core.api.values import Act
from vtorque_core.base.names import Paths

if TYPE_CHECKING:
    from vtorque_core.api.guest_driver import GuestDriver
    from vtorque_core.api.guest_plan import GuestPlan


@dataclass(frozen=True)
class Identity:
    """Properties that a guest keeps from the job or node that it was booted for.

    Attributes:
        name, uuid: name and UUID of the libvirt domain.
        job_id, attempt: the job attempt from which the guest's secrets derive.
        leased: (pool, item) of each address. The new job must lease these addresses, too.
    """

    name: str
    uuid: str
    hostname: str
    job_id: str
    attempt: int
    leased: tuple[tuple[str, str], ...]


class Boot(Protocol):
    """The start of one guest, as its boot source sees it. As root, in this guest's thread.

    Every method raises HostFault if libvirt or the guest fails, or after the deadline.

    Attributes:
        failed: set when another guest of the job has failed.
        channels: Unix sockets of the guest's channels.
    """

    guest: GuestPlan
    paths: Paths
    failed: threading.Event
    channels: Sequence[Path]

    @property
    def deadline(self) -> float:
        """Deadline of the current step in ``time.monotonic()`` seconds."""

    @property
    def rendered(self) -> str:
        """Domain XML for a cold boot."""

    def create(self) -> None:
        """Start the domain of :attr:`rendered`."""

    def adapt_xml(self, xml: str, state_dir: Path, run_dir: Path) -> str:
        """Return the XML of an earlier domain, adapted to this guest's files, owner and CPUs.

        ``xml`` must come from a root-owned file. The directories are those of the earlier guest.
        Raises Refused if the job requests other virtual hardware.
        """

    def restore(self, memory: Path, state_dir: Path, run_dir: Path) -> None:
        """Restore a domain, paused, from the file ``memory`` that libvirt saved.

        The directories are as in :meth:`adapt_xml`.
        """

    def adopt_guest(self) -> None:
        """Attach this guest's devices to the warm guest, and resume it."""

    def resume(self) -> None:
        """Resume the restored domain."""

    def await_ready(self) -> None:
        """Wait until the guest reports READY."""

    def set_clock(self) -> None:
        """Set the guest's clock after a suspension, if the driver supports it."""


class BootSource:
    """A source from which one guest starts. Override the methods that differ from a cold boot.

    Attributes:
        forbids: operations that libvirt cannot do with the guest later. The source is not used for
            a job whose options need one of these operations.
        fallback: boot the guest cold if the source raises HostFault, or if the guest is not ready
            after half of the remaining time.
        brings_disk: :meth:`start` or ``vtorque_pre_boot`` creates the guest's disk
            (``GuestPlan.root_disk``).
        remote: the guest runs on another node until :meth:`start` returns. The time limit of the
            start then begins again. A failed start destroys no domain.
    """

    name: str = "cold"
    forbids: frozenset[Act] = frozenset()
    fallback: bool = False
    brings_disk: bool = False
    remote: bool = False

    @property
    def identity(self) -> Identity | None:
        """Identity that the guest keeps; None: a new guest of this job."""
        return None

    @property
    def warm_key(self) -> str:
        """Key of the warm guest that becomes the job's guest; empty: none."""
        return ""

    def start(self, boot: Boot) -> None:
        """Create the domain before ``boot.deadline``."""
        boot.create()

    def run(self, boot: Boot) -> None:
        """Resume the domain if :meth:`start` created it paused."""

    def await_ready(self, boot: Boot) -> None:
        """Wait until the guest can run the script, at most until ``boot.deadline``."""
        boot.await_ready()


class ColdBoot(BootSource):
    """The default source: a boot of the guest's operating system."""


@dataclass(frozen=True)
class Offer:
    """A boot source that a plugin offers for the guest with this ``index``."""

    index: int
    source: BootSource


@dataclass(frozen=True)
class RenderedGuest:
    """A placed guest before its start.

    ``bare_xml`` returns the XML of its domain without hot-plugged devices, owner and names. A warm
    guest whose XML is equal can become this guest.
    """

    plan: GuestPlan
    driver: GuestDriver
    bare_xml: Callable[[], str]
