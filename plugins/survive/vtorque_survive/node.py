"""Hook implementations: what a job's start, its end and ``vtorque doctor`` need on a node."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from vtorque_core.api import Refusal, Refused, always, hookimpl
from vtorque_core.api.claims import PoolClaim
from vtorque_core.api.guest_plan import GuestPlan
from vtorque_core.api.health import HealthCheck
from vtorque_core.api.job_files import File
from vtorque_core.api.kept_records import Place, place
from vtorque_core.api.node_job import NodeJob, Site
from vtorque_survive import move_record, periodic, placeholder, receive, restore, shared
from vtorque_survive.asked import CHECKPOINT, NEVER
from vtorque_survive.placeholder import Placeholder
from vtorque_survive.process import Watcher
from vtorque_survive.request import Fifo, path_of
from vtorque_survive.settings import Settings
from vtorque_survive.stored import Store


@hookimpl
def vtorque_pre_boot(job: NodeJob) -> None:
    """Create the job shell's lock file and the owner's FIFO, and start the node's watcher.

    The watcher starts while the guests boot, so nobody waits for it.
    """
    paths, key = job.site.paths, job.guests[0].job.key
    _require_saveable(job)
    job.acquire(File(str(paths.job_shell(key)), mode=0o400, reader=job.user.uid))
    job.acquire(Fifo(str(path_of(paths, key)), job.user.uid))
    placeholder.hold(job)
    if placeholder.comes(job):
        move_record.comes_back(paths, key)
        restore.await_disks(job)
    else:
        periodic.plan(job)
        restore.bring(job)
    Watcher.start(job, "it cannot be suspended")


def _require_saveable(job: NodeJob) -> None:
    """Refuse a job with ``checkpoint=`` if this node cannot save guests of its image."""
    guest = job.guests[0]
    lacking = place(job.site.paths, guest.job).facts().get("unsaveable", ())
    if guest[CHECKPOINT] != NEVER and lacking:
        said = f"node {guest.job.node} cannot save guests with {', '.join(map(str, lacking))}"
        value = CHECKPOINT.show(guest[CHECKPOINT])
        raise Refused(Refusal(said, CHECKPOINT.key, value, fix="leave it out"))


@hookimpl
def vtorque_post_boot(job: NodeJob) -> None:
    """Record that the job was restored successfully."""
    if placeholder.comes(job):  # it may have been here before
        move_record.forget(job.site.paths, job.guests[0].job.key)
    else:
        restore.works(job)


@hookimpl
def vtorque_ended(place: Place, site: Site) -> None:
    """Remove unfinished checkpoints of an ended job."""
    if site[Settings].checkpoints:
        store = Store(Path(site[Settings].checkpoints), place.uid)
        for name in store.unfinished(place.key):
            store.drop(name)


@hookimpl
def vtorque_health_checks() -> Iterable[HealthCheck]:
    """Return the checks for doctor.

    They are imported here because all hooks import this module, and no other hook needs them.
    """
    from vtorque_survive import abilities, health  # noqa: PLC0415

    return [
        HealthCheck("survive: suspended jobs", health.suspended),
        HealthCheck("survive: what this node can do", abilities.check),
        HealthCheck("survive: the node's health", health.check),
    ]


@hookimpl
def vtorque_reserved(guests: Sequence[GuestPlan], site: Site) -> Iterator[PoolClaim]:
    """Yield the addresses of checkpoints and of guests that have migrated to other nodes."""
    yield from shared.away(guests, site)
    move_record.forget_ended(site)
    yield from move_record.taken_along(guests, site.paths)


vtorque_resources = always(Watcher, Fifo, restore.Disk, restore.Link, shared.Held, Placeholder)
vtorque_boot_sources = restore.vtorque_boot_sources
vtorque_receive = receive.vtorque_receive
vtorque_render_domain = restore.vtorque_render_domain
