"""Hook implementations for a job's start, its end and ``vtorque doctor`` on a node."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from vtorque_core.api import Image, JobRequest, Refusal, Refused, hookimpl
from vtorque_core.api.acquired import Resource
from vtorque_core.api.batch_system import BatchJob
from vtorque_core.api.boot_source import BootSource
from vtorque_core.api.claims import PoolClaim
from vtorque_core.api.guest_plan import GuestPlan, JobUser
from vtorque_core.api.health import HealthCheck
from vtorque_core.api.job_files import File
from vtorque_core.api.kept_records import Place, place
from vtorque_core.api.libvirt_domain import CpuModel, Element
from vtorque_core.api.node_job import NodeJob, ReceivingNode, Site
from vtorque_survive.asked import CHECKPOINT, NEVER, RESUME
from vtorque_survive.settings import Settings, moves_directory

# Importing all of this plugin would take a tenth of a job's start, and the batch system waits for
# the hooks up to vtorque_reserved_items. The hooks therefore import only what the job needs.


@hookimpl
def vtorque_boot_sources(
    job: BatchJob, request: JobRequest, image: Image, user: JobUser, site: Site
) -> Iterator[BootSource]:
    """Yield the saved guests if the job is restored from a checkpoint."""
    if job.attempt or request[RESUME] or site[Settings].checkpoints_shared:
        from vtorque_survive import restore  # noqa: PLC0415 - few jobs are restored

        yield from restore.boot_sources(job, request, image, user, site)


@hookimpl
def vtorque_reserved_items(guests: Sequence[GuestPlan], site: Site) -> Iterator[PoolClaim]:
    """Yield the addresses of guests that are saved or have migrated to other nodes."""
    if site[Settings].checkpoints:
        from vtorque_survive import shared  # noqa: PLC0415 - few sites keep checkpoints

        yield from shared.reserved_addresses(guests, site)
    if any(moves_directory(site.paths).glob("*.json")):
        from vtorque_survive import move_record  # noqa: PLC0415 - few guests migrate

        move_record.forget_ended(site)
        yield from move_record.migrated_addresses(guests, site.paths)


@hookimpl
def vtorque_render_domain(guest: GuestPlan, site: Site) -> Iterator[Element]:
    """Use the site's CPU model if a guest may be saved. A restored guest keeps its model."""
    model = site[Settings].cpu_model
    if model and guest[CHECKPOINT] != NEVER and guest.source.identity is None:
        yield CpuModel(model)


@hookimpl
def vtorque_pre_boot(job: NodeJob) -> None:
    """Create the job shell's lock file and the owner's FIFO, and start the node's watcher.

    The watcher starts while the guests boot, so it does not delay the job.
    """
    from vtorque_survive import (  # noqa: PLC0415 - after the batch system's answer
        move_record,
        periodic,
        placeholder,
        restore,
    )
    from vtorque_survive.process import Watcher  # noqa: PLC0415 - as above
    from vtorque_survive.request import Fifo, path_of  # noqa: PLC0415 - as above

    paths, key = job.site.paths, job.guests[0].job.key
    _require_saveable(job)
    job.acquire(File(str(paths.job_shell(key)), mode=0o400, reader=job.user.uid))
    job.acquire(Fifo(str(path_of(paths, key)), job.user.uid))
    placeholder.acquire_placeholder(job)
    if placeholder.is_migrating(job):
        move_record.keep_for_return(paths, key)
        restore.await_disks(job)
    else:
        periodic.plan(job)
        restore.acquire_saved(job)
    Watcher.start(job, "the job cannot be suspended")


def _require_saveable(job: NodeJob) -> None:
    """Refuse a job with ``checkpoint=`` if this node cannot save guests of its image."""
    guest = job.guests[0]
    lacking = place(job.site.paths, guest.job).facts().get("unsaveable", ())
    if guest[CHECKPOINT] != NEVER and lacking:
        said = f"node {guest.job.node} cannot save guests with {', '.join(map(str, lacking))}"
        value = CHECKPOINT.show(guest[CHECKPOINT])
        raise Refused(Refusal(said, CHECKPOINT.key, value, fix="leave out checkpoint"))


@hookimpl
def vtorque_post_boot(job: NodeJob) -> None:
    """Record that the job was restored successfully."""
    from vtorque_survive import move_record, placeholder, restore  # noqa: PLC0415 - as above

    if placeholder.is_migrating(job):  # a record of an earlier migration from here
        move_record.forget(job.site.paths, job.guests[0].job.key)
    else:
        restore.reset_failures(job)


@hookimpl
def vtorque_job_ended(place: Place, site: Site) -> None:
    """Remove unfinished checkpoints of an ended job."""
    if site[Settings].checkpoints:
        from vtorque_survive.stored import Store  # noqa: PLC0415 - few sites keep checkpoints

        store = Store(Path(site[Settings].checkpoints), place.uid)
        for name in store.list_unfinished(place.key):
            store.drop(name)


@hookimpl
def vtorque_health_checks() -> Iterable[HealthCheck]:
    """Return the checks for doctor."""
    from vtorque_survive import abilities, health  # noqa: PLC0415 - only doctor needs them

    return [
        HealthCheck("survive: suspended jobs", health.check_suspended),
        HealthCheck("survive: supported actions", abilities.check),
        HealthCheck("survive: the node's health", health.check),
    ]


@hookimpl
def vtorque_resources() -> Iterable[type[Resource]]:
    """Return the resource classes of this plugin, which teardown loads."""
    from vtorque_survive import restore, shared  # noqa: PLC0415 - only a teardown needs them
    from vtorque_survive.placeholder import Placeholder  # noqa: PLC0415 - as above
    from vtorque_survive.process import Watcher  # noqa: PLC0415 - as above
    from vtorque_survive.request import Fifo  # noqa: PLC0415 - as above

    return [Watcher, Fifo, restore.RestoredDisk, restore.Link, shared.UseMark, Placeholder]


@hookimpl
def vtorque_receive(node: ReceivingNode) -> None:
    """Receive guests from another node. Errors are also reported to the sender."""
    from vtorque_survive import receive  # noqa: PLC0415 - few guests migrate

    receive.receive_guests(node)
