"""Migrate running guests to another node.

Privileges: root. Errors: HostFault if libvirt fails.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from vtorque_core.api import HostFault, Paths
from vtorque_core.live import libvirt, suspend
from vtorque_core.live.jobs import RunningGuest, RunningJob
from vtorque_core.live.locked_job import ARRIVES, DOMAIN, LockedJob, journal_of
from vtorque_core.live.site_config import load
from vtorque_survive import domains
from vtorque_survive.domains import State
from vtorque_survive.saving import GuestData, own_disks

MOVES = "moves"
"""The phase of a job while its guests migrate to another node."""

_POLL = 0.1  # seconds; libvirt sends no event when it has migrated a guest


@dataclass(frozen=True)
class MigrationNode:
    """Settings of this node: libvirt's URI, and the time limit in seconds for a guest's start."""

    uri: str
    start_timeout: float

    @classmethod
    def from_config(cls, config: Path) -> Self:
        """Read the settings from the site config. Raises ConfigError."""
        node = load(config, node=False)[0].node
        return cls(node.libvirt_uri, node.start_timeout)


def describe_guests(
    job: RunningJob, guests: Sequence[GuestData], nodes: Sequence[str], to: str
) -> dict[str, Any]:
    """Return a description of a job's guests for the destination node ``to``.

    ``nodes`` are the job's nodes after the migration.
    """
    return {
        "job": job.job.id,
        "nodes": list(nodes),
        "leaves": job.job.node,
        "to": to,
        "versions": libvirt.versions(guests[0].guest.uri),
        "guests": [_describe(each, *job.kept.facts()["booted_for"]) for each in guests],
    }


def _describe(each: GuestData, job_id: str, attempt: int) -> dict[str, Any]:
    guest = each.guest
    return {
        "name": guest.name,
        "uuid": guest.uuid,
        "hostname": guest.hostname,
        "job_id": job_id,
        "attempt": attempt,
        "leased": each.leased,
        "state_dir": str(each.state_dir),
        "run_dir": str(guest.run_dir),
        "xml": domains.migratable_xml(guest.uri, guest.uuid),
    }


def migrate_guest(each: GuestData, to: str, xml: str, seconds: float) -> None:
    """Migrate a guest to the libvirtd at the URI ``to``, with domain XML for the destination.

    Before this call, pause a guest with its own disk, and copy the disk. The guest stays paused on
    the destination. Call this function within the context
    :func:`vtorque_survive.saving.libvirt_operation`.

    Raises HostFault if the migration fails, or has no known result after ``seconds``. To find out
    which node has the guest, call :func:`await_state`, then query the destination.
    """
    guest, paused = each.guest, each.disk is not None
    domains.migrate_domain(guest.uri, guest.uuid, to, xml, seconds, paused=paused)


def disks(paths: Paths, key: str) -> dict[str, Path]:
    """Return the guests' own disks on this node, by the guests' UUID."""
    if (state := journal_of(paths, key)) is None:
        return {}
    own = own_disks(state)
    domains = [record for record in state.open if record.kind == DOMAIN]
    return {str(r.args["uuid"]): own[r.guest] for r in domains if r.guest in own}


def await_state(uri: str, uuid: str, seconds: float) -> State:
    """Wait until libvirt no longer migrates a domain, and return the domain's state on this node.

    The state is "runs", "still" (paused), or "" (not on this node). Raises HostFault after
    ``seconds``.
    """
    until = time.monotonic() + seconds
    while domains.is_busy(uri, uuid):
        if time.monotonic() >= until:
            raise HostFault("libvirt is still migrating the guest")
        time.sleep(_POLL)
    return domains.domain_state(uri, uuid)


def pause(guest: RunningGuest) -> None:
    """Pause a guest before its migration."""
    with suspend.kill_stopped(guest):
        libvirt.suspend_domain(guest.uri, guest.uuid, suspend.STOPS)


def release_guests(job: LockedJob, uuids: Collection[str]) -> None:
    """Release the domains of migrated guests, and continue the job with its other guests."""
    job.release_domains(uuids)
    job.enter(suspend.RUNS)


def complete_arrival(job: LockedJob, uuids: Collection[str]) -> None:
    """Complete the start of guests that have migrated here, if the receiver was killed.

    Idempotent. ``uuids`` are the domains that have arrived.
    """
    marks = [each.name for each in job.state.phases if each.guest is None]
    if suspend.RUNS not in marks[marks.index(ARRIVES) :]:
        job.complete_arrival(uuids)
        job.enter(suspend.RUNS)
