"""What holds this node for a guest of a job that does not have the node, as a resource."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vtorque_core.api.acquired import Resource
from vtorque_core.api.batch_system import MovingAdapter
from vtorque_core.api.node_job import NodeJob
from vtorque_core.live import service


@dataclass(frozen=True)
class Placeholder(Resource):
    """The batch system's word for it: it is there before, and ends with what the guest has here."""

    kind = "survive-placeholder"
    volatile = False
    job: str
    node: str
    config: str

    def create(self) -> None:
        """Do nothing: who receives the guest has asked for it."""

    def release(self) -> None:
        """End it; gone already is fine. Raises HostFault."""
        site, batch = service.batch_system(Path(self.config))
        adapter = batch.node(site)
        if isinstance(adapter, MovingAdapter):
            adapter.let_go(self.job, self.node)


def comes(job: NodeJob) -> bool:
    """Return whether the guest of a job that starts here comes from another node."""
    return job.guests[0].source.remote


def hold(job: NodeJob) -> None:
    """Have the placeholder end with the guest, if that comes from another node."""
    first = job.guests[0]
    if comes(job):
        job.acquire(Placeholder(job.id, first.job.node, str(job.site.path)), guest=first)
