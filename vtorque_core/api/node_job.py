"""A job on this node, and the site config, as hooks see them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from vtorque_core.api.acquired import Resource
from vtorque_core.base.names import JobAttempt, Paths

if TYPE_CHECKING:
    from vtorque_core.api.guest_plan import BootSource, GuestPlan, JobUser

S = TypeVar("S")


class Site(Protocol):
    """Site config for plugins."""

    @property
    def paths(self) -> Paths:
        """Directories of vTorque."""

    @property
    def path(self) -> Path:
        """Path of the config file."""

    def __getitem__(self, settings: type[S]) -> S:
        """Return the plugin's settings: ``site[Settings]``."""


class NodeJob(Protocol):
    """A job on this node that starts or runs, for hooks that act as root."""

    @property
    def id(self) -> str:
        """Job id of the batch system."""

    @property
    def user(self) -> JobUser:
        """Owner of the job."""

    @property
    def site(self) -> Site:
        """Site config."""

    @property
    def guests(self) -> Sequence[GuestPlan]:
        """Placed guests on this node."""

    @property
    def deadline(self) -> float:
        """Deadline of the start in ``time.monotonic()`` seconds."""

    def acquire(
        self, resource: Resource, guest: GuestPlan | None = None, needs: Iterable[int] = ()
    ) -> int:
        """Journal ``resource``, create it, and return its record's number.

        ``needs`` are numbers of other records, which are released after ``resource``.
        """

    def warn(self, text: str) -> None:
        """Print ``text`` once on the job's standard error, before the script runs, and log it.

        ``text`` is one line about a missing capability, without secrets.
        """


class ReceivingNode(Protocol):
    """This node as destination of migrating guests. As root."""

    @property
    def requests(self) -> int:
        """Descriptor for reading the source node's requests."""

    @property
    def answers(self) -> int:
        """Descriptor for writing answers to the source node."""

    @property
    def uri(self) -> str:
        """URI of this node's libvirt."""

    @property
    def start_timeout(self) -> float:
        """Time limit of a job's start in seconds."""

    def require_versions(self, name: str, versions: Mapping[str, str]) -> None:
        """Raise Refused unless this node, ``name``, can run the source node's guests.

        ``versions``: software versions of the source node, by component.
        """

    def start(
        self, job_id: str, nodes: Sequence[str], left: str, name: str,
        sources: Sequence[BootSource], keeps: Callable[[], bool],
    ) -> None:  # fmt: skip
        """Start the guests of ``sources`` on this node, as the prologue starts a job.

        ``nodes`` are the job's nodes after the migration, in rank order. ``left`` is the source
        node, ``name`` this node. After a failed start, resources are kept only if ``keeps()``
        returns True.

        Raises Refused if this node may not run the guests, and HostFault if the start fails.
        """


@dataclass(frozen=True)
class EndedJob:
    """A job as its journal describes it, for teardown. ``guests`` are libvirt domain names."""

    job: JobAttempt
    guests: tuple[str, ...]
    paths: Paths
