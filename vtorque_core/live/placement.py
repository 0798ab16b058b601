"""Show which jobs hold a node's cores, memory and pool items. As root."""

from __future__ import annotations

from dataclasses import dataclass, field

from vtorque_core.api.host_topology import parse_cpus
from vtorque_core.base.names import Paths
from vtorque_core.config.site_config import Site
from vtorque_core.plan.placement import ledger, node_hardware
from vtorque_core.plan.placement.model import Leases, NodeShare
from vtorque_core.records.reading import JournalState, walk


@dataclass
class GuestLeases:
    """Leases of one guest.

    Attributes:
        cores: exclusive host CPUs by their use (``CoreClaim.use``).
        nodes: ids of the NUMA nodes that have its memory, if known.
        items: items of other pools, by pool.
    """

    index: int
    cores: dict[str, list[int]] = field(default_factory=dict)
    mib: int = 0
    nodes: list[int] = field(default_factory=list)
    items: dict[str, list[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class JobLeases:
    """Leases of one job. ``cpus`` are all its host CPUs, empty if unknown."""

    id: str
    owner: str
    cpus: tuple[int, ...]
    guests: list[GuestLeases]


@dataclass(frozen=True)
class NodeLeases:
    """Leases of all jobs on this node, and its hardware.

    Attributes:
        share: the hardware, and the part that is reserved for the host.
        taken: sums of all leases.
    """

    share: NodeShare
    taken: Leases
    jobs: list[JobLeases]


def node_leases(site: Site) -> NodeLeases:
    """Return this node's leases. Raises JournalError; HostFault if libvirt does not answer."""
    share = NodeShare(
        node_hardware.topology(site.node.libvirt_uri),
        reserve_cores=site.node.host_reserve_cores,
        reserve_mib=site.node.host_reserve_ram,
    )
    return read_leases(site.paths, share)


def read_leases(paths: Paths, share: NodeShare) -> NodeLeases:
    """Return the leases of a node with this hardware. Raises JournalError."""
    held = list(walk(paths))
    jobs = [_job(state) for state in held if state.leases]
    return NodeLeases(share, ledger.leased_resources(held), jobs)


def job_leases(paths: Paths) -> list[JobLeases]:
    """Return the leases of all jobs of this node whose journals are readable."""
    return [_job(state) for state in walk(paths, troubled=lambda *_: None)]


def _job(state: JournalState) -> JobLeases:
    guests: dict[int, GuestLeases] = {}
    cpus: tuple[int, ...] = ()
    for lease in state.leases:
        args, pool = lease.args, str(lease.args["pool"])
        if pool == ledger.SHARE:
            cpus = parse_cpus(str(args["cpus"]))
        if lease.guest is None:
            continue
        guest = guests.setdefault(lease.guest, GuestLeases(lease.guest))
        if pool == ledger.CORE:
            guest.cores.setdefault(str(args.get("use")) or "own", []).append(int(args["item"]))
        elif pool == ledger.MEMORY:
            guest.mib += int(args["mib"])
            guest.nodes = sorted({*guest.nodes, int(args.get("node", -1))} - {-1})
        else:
            guest.items.setdefault(pool, []).append(str(args["item"]))
    job = state.header.job
    return JobLeases(job.id, job.owner, cpus, [guests[index] for index in sorted(guests)])
