"""A job on this node as hooks see it, and the site config."""

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
    """The site config as a plugin may see it: its own settings, typed, and vTorque's paths."""

    @property
    def paths(self) -> Paths:
        """vTorque's own directories."""

    @property
    def path(self) -> Path:
        """The config file, for a process of the plugin's own that reads it again."""

    def __getitem__(self, settings: type[S]) -> S:
        """Return the plugin's settings: ``site[Settings]``."""


class NodeJob(Protocol):
    """The running job as an action hook sees it, once per job and node, as root."""

    @property
    def id(self) -> str:
        """The batch system's job id."""

    @property
    def user(self) -> JobUser:
        """The job's owner."""

    @property
    def site(self) -> Site:
        """The site config."""

    @property
    def guests(self) -> Sequence[GuestPlan]:
        """This node's guests, placed."""

    @property
    def deadline(self) -> float:
        """The one deadline of the start, in ``time.monotonic()`` seconds."""

    def acquire(
        self, resource: Resource, guest: GuestPlan | None = None, needs: Iterable[int] = ()
    ) -> int:
        """Journal ``resource``, fsync, create it; return the record's number for ``needs``."""

    def warn(self, text: str) -> None:
        """Tell user and admin, once, what the job has to do without: one line, no secrets.

        The user gets it with the job's first errors, as a Notice; the admin also in syslog.
        """


@dataclass(frozen=True)
class EndedJob:
    """What teardown knows: only what the journal says. ``guests`` are libvirt domain names."""

    job: JobAttempt
    guests: tuple[str, ...]
    paths: Paths
