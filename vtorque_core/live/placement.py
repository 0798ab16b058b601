"""Show which jobs hold a node's cores, memory and pool items. As root."""

from __future__ import annotations

from dataclasses import dataclass

from vtorque_core.base.names import Paths
from vtorque_core.config.site_config import Site
from vtorque_core.plan.job_context import whole_node
from vtorque_core.plan.placement import ledger
from vtorque_core.plan.placement.model import Leases, NodeShare
from vtorque_core.records.reading import JournalState, walk
from vtorque_core.resources.lease import Lease

CORE, MEMORY, CPUS = ledger.CORE, ledger.MEMORY, ledger.SHARE
"""Pools of exclusive host CPUs, of memory, and of the list of all CPUs of a job."""


@dataclass(frozen=True)
class JobLeases:
    """Leases of one job, each with the index of its guest (None: the whole job)."""

    id: str
    owner: str
    leases: list[tuple[int | None, Lease]]


@dataclass(frozen=True)
class NodeLeases:
    """Leases of all jobs on this node.

    Attributes:
        share: the hardware, and the part that is reserved for the host.
        taken: sums of all leases.
    """

    share: NodeShare
    taken: Leases
    jobs: list[JobLeases]


def node_leases(site: Site) -> NodeLeases:
    """Return this node's leases. Raises JournalError; HostFault if libvirt does not answer."""
    return read_leases(site.paths, whole_node(site))


def read_leases(paths: Paths, share: NodeShare) -> NodeLeases:
    """Return the leases like :func:`node_leases`, for a given ``share``."""
    held = list(walk(paths))
    return NodeLeases(share, ledger.leased_resources(held), [_job(each) for each in held])


def job_leases(paths: Paths) -> list[JobLeases]:
    """Return the leases of all jobs of this node whose journals are readable."""
    return [_job(state) for state in walk(paths, troubled=lambda *_: None)]


def _job(state: JournalState) -> JobLeases:
    leases = [(record.guest, Lease(**record.args)) for record in state.leases]
    return JobLeases(state.header.job.id, state.header.job.owner, leases)
