"""Hook implementations for a job's start, its end and ``vtorque doctor`` on a node."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from vtorque_core.api import Image, JobRequest, deferred, hookimpl
from vtorque_core.api.kept_records import Place
from vtorque_core.api.node_job import NodeJob, ReceivingNode, Site
from vtorque_survive.process import WatcherProcess
from vtorque_survive.resume_options import CHECKPOINT, NEVER, RESUME
from vtorque_survive.settings import Settings, moves_directory

if TYPE_CHECKING:  # a job's end waits for the imports of this module
    from vtorque_core.api.batch_system import BatchJob
    from vtorque_core.api.boot_source import BootSource
    from vtorque_core.api.claims import PoolClaim
    from vtorque_core.api.guest_plan import GuestPlan, JobUser
    from vtorque_core.api.libvirt_domain import Element

_prepare_job = deferred("vtorque_survive.start:prepare_job")
_remove_old_records = deferred("vtorque_survive.start:remove_old_records")
_receive_guests = deferred("vtorque_survive.receive:receive_guests")
_UNWATCHED = "the job cannot be suspended"

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
    """Yield network addresses of guests in checkpoints and of guests that migrated away."""
    if site[Settings].checkpoints:
        from vtorque_survive import shared_store  # noqa: PLC0415 - few sites keep checkpoints

        yield from shared_store.reserved_addresses(guests, site)
    if any(moves_directory(site.paths).glob("*.json")):
        from vtorque_survive import migration_record  # noqa: PLC0415 - few guests migrate

        migration_record.forget_ended(site)
        yield from migration_record.migrated_addresses(guests, site.paths)


@hookimpl
def vtorque_render_domain(guest: GuestPlan, site: Site) -> Iterator[Element]:
    """Yield the site's CPU model for a guest that may be saved, unless the guest is restored."""
    model = site[Settings].cpu_model
    if model and guest[CHECKPOINT] != NEVER and guest.source.identity is None:
        from vtorque_core.api.libvirt_domain import CpuModel  # noqa: PLC0415 - few sites set it

        yield CpuModel(model)


@hookimpl
def vtorque_pre_boot(job: NodeJob) -> None:
    """Create the job's lock file, its FIFO to the node's watcher, and what restored guests need.

    Start the watcher before the boot if it checks the node's health, because boots may fail, and
    if guests migrate here, because this process may be killed when they have arrived.
    """
    _prepare_job(job)
    if _needs_early_watcher(job):
        WatcherProcess.start(job, _UNWATCHED)


@hookimpl
def vtorque_while_booting(job: NodeJob) -> None:
    """Start the node's watcher, unless :func:`vtorque_pre_boot` has done so."""
    if not _needs_early_watcher(job):
        WatcherProcess.start(job, _UNWATCHED)


def _needs_early_watcher(job: NodeJob) -> bool:
    return job.guests[0].source.remote or bool(job.site[Settings].health_command)


@hookimpl
def vtorque_post_boot(job: NodeJob) -> None:
    """Remove the count of the job's failed restores, because the guests run now.

    Guests that migrated to this node have no such count. For these, remove the record of their
    earlier migration from this node to another node, if there is a record.
    """
    source = job.guests[0].source
    if source.remote or source.identity is not None:
        _remove_old_records(job)


@hookimpl
def vtorque_job_ended(place: Place, site: Site) -> None:
    """Remove unfinished checkpoints of an ended job."""
    if site[Settings].checkpoints:
        from vtorque_survive.stored import Store  # noqa: PLC0415 - few sites keep checkpoints

        store = Store(Path(site[Settings].checkpoints), place.uid)
        for name in store.list_unfinished(place.key):
            store.drop(name)


@hookimpl
def vtorque_receive(node: ReceivingNode) -> None:
    """Receive guests from another node, and send errors to that node."""
    _receive_guests(node)


vtorque_health_checks = hookimpl(deferred("vtorque_survive.health:checks"))
vtorque_resources = hookimpl(deferred("vtorque_survive.resources:resources"))
