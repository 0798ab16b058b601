"""A job on this node, and the site config, as hooks see them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeVar

from vtorque_core.api.acquired import Resource
from vtorque_core.api.guest_plan import GuestPlan, JobUser
from vtorque_core.base.names import JobAttempt, Paths

S = TypeVar("S")


class Site(Protocol):
    """Site config for plugins: typed settings of the plugin, and vTorque's paths."""

    @property
    def paths(self) -> Paths:
        """Directories of vTorque."""

    @property
    def path(self) -> Path:
        """Path of the config file, for a plugin's own process that reads it again."""

    def __getitem__(self, settings: type[S]) -> S:
        """Return the plugin's settings: ``site[Settings]``."""


class NodeJob(Protocol):
    """A running job in action hooks: once per job and node, as root."""

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
        """Journal ``resource``, fsync, and create it; return the record's number for ``needs``."""

    def warn(self, text: str) -> None:
        """Notify user and admin once what the job runs without: one line, no secrets.

        The user reads it before the job's standard error, as a Notice; the admin reads it in
        syslog.
        """


@dataclass(frozen=True)
class EndedJob:
    """What the journal says of a job, for teardown. ``guests`` are libvirt domain names."""

    job: JobAttempt
    guests: tuple[str, ...]
    paths: Paths
