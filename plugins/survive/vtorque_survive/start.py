"""This plugin's actions at a job's start on a node."""

from __future__ import annotations

from vtorque_core.api import Refusal, Refused
from vtorque_core.api.job_files import File
from vtorque_core.api.kept_records import place
from vtorque_core.api.node_job import NodeJob
from vtorque_survive import placeholder
from vtorque_survive.request import Fifo, path_of
from vtorque_survive.resume_options import CHECKPOINT, NEVER, RESUME
from vtorque_survive.settings import Settings


def prepare_job(job: NodeJob) -> None:
    """Create the job's lock file, its FIFO to the node's watcher, and what restored guests need."""
    first = job.guests[0]
    paths, key = job.site.paths, first.job.key
    _require_saveable(job)
    job.acquire(File(str(paths.job_shell(key)), mode=0o400, reader=job.user.uid))
    job.acquire(Fifo(str(path_of(paths, key)), job.user.uid))
    placeholder.acquire_placeholder(job)
    if placeholder.is_migrating(job):
        from vtorque_survive import migration_record, restore  # noqa: PLC0415 - few guests migrate

        migration_record.keep_for_return(paths, key)
        restore.acquire_empty_disks(job)
    elif job.site[Settings].checkpoints or first[CHECKPOINT] != NEVER or first.request[RESUME]:
        from vtorque_survive import periodic, restore  # noqa: PLC0415 - few jobs are saved

        periodic.plan(job)
        restore.acquire_saved(job)


def _require_saveable(job: NodeJob) -> None:
    """Refuse a job with ``checkpoint=`` if this node cannot save guests of its image."""
    guest = job.guests[0]
    lacking = place(job.site.paths, guest.job).facts().get("unsaveable", ())
    if guest[CHECKPOINT] != NEVER and lacking:
        said = f"node {guest.job.node} cannot save guests with {', '.join(map(str, lacking))}"
        value = CHECKPOINT.show(guest[CHECKPOINT])
        raise Refused(Refusal(said, CHECKPOINT.key, value, fix="leave out checkpoint"))


def remove_old_records(job: NodeJob) -> None:
    """Remove records that are obsolete because the job's guests now run on this node.

    These are the count of failed restores or, for guests that migrated here, the record of their
    earlier migration from this node.
    """
    from vtorque_survive import migration_record, restore  # noqa: PLC0415 - few jobs are restored

    if placeholder.is_migrating(job):
        migration_record.forget(job.site.paths, job.guests[0].job.key)
    else:
        restore.reset_failures(job)
