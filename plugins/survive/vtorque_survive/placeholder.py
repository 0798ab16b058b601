"""The batch system's placeholder job, which reserves this node for a guest that migrated here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vtorque_core.api.acquired import Resource
from vtorque_core.api.batch_system import MigrationAdapter
from vtorque_core.api.node_job import NodeJob


@dataclass(frozen=True)
class Placeholder(Resource):
    """The placeholder job as a resource, released when the migrated guest ends."""

    kind = "survive-placeholder"
    volatile = False
    job: str
    node: str
    config: str

    def create(self) -> None:
        """Do nothing: the batch system's adapter has already submitted the placeholder job."""

    def release(self) -> None:
        """Cancel the placeholder job. Idempotent."""
        from vtorque_core.live import service  # noqa: PLC0415 - few guests migrate

        site, batch = service.batch_system(Path(self.config))
        adapter = batch.node(site)
        if isinstance(adapter, MigrationAdapter):
            adapter.release_node(self.job, self.node)


def is_migrating(job: NodeJob) -> bool:
    """Return whether the guests of the starting job migrate from another node."""
    return job.guests[0].source.remote


def acquire_placeholder(job: NodeJob) -> None:
    """Record the job that reserves this node's resources for guests that migrate here.

    Without a migration, do nothing.
    """
    first = job.guests[0]
    if is_migrating(job):
        job.acquire(Placeholder(job.id, first.job.node, str(job.site.path)), guest=first)
