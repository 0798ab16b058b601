"""A job's share of a node, other jobs' leases, and the error for claims that do not fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from vtorque_core.api.host_topology import NumaNode, Topology
from vtorque_core.base.errors import Refusal
from vtorque_core.site.job_size import JobGrant


class NoFit(Exception):
    """The claims do not fit. The caller decides between Refused and a host fault."""

    def __init__(self, message: str, **parts: str | None) -> None:
        self.refusal = Refusal(message, **parts)
        super().__init__(str(self.refusal))


@dataclass(frozen=True)
class NodeShare:
    """The job's grant on this node, and the node's hardware.

    Attributes:
        cpus: host CPU ids of the job; empty: unknown.
        reserve_cores, reserve_mib: reserved for the host. If ``cpus`` is known, shared threads of
            guests may run on reserved CPUs; no guest gets them exclusively.
        exclusive: if ``cpus`` is unknown, only one user at a time gets the node.
        whole_node: the batch system runs no other job on the node.
        numa: default for binding RAM to NUMA nodes; None: not bound.
    """

    machine: Topology
    cpus: tuple[int, ...] = ()
    cpu_count: int | None = None
    mem_mib: int | None = None
    reserve_cores: int = 0
    reserve_mib: int = 0
    exclusive: bool = True
    whole_node: bool = False
    numa: Literal["preferred", "strict"] | None = "preferred"

    @cached_property
    def reserved(self) -> tuple[int, ...]:
        """Reserved CPUs: the lowest ones with their SMT siblings."""
        ordered: dict[int, None] = {}
        for cpu in self.machine.cpus:
            ordered.update(dict.fromkeys(self.machine.siblings(cpu)))
        return tuple(ordered)[: self.reserve_cores]

    @cached_property
    def usable(self) -> tuple[int, ...]:
        """CPU ids that the job's guests could use if no other job were on the node."""
        return self.cpus or tuple(c for c in self.machine.cpus if c not in self.reserved)

    @property
    def is_count_only(self) -> bool:
        """True if the batch system grants only a number of CPUs; vTorque's ledger chooses them."""
        return not self.cpus and self.cpu_count is not None and not self.whole_node

    @property
    def limit(self) -> int:
        usable = len(self.usable)
        return usable if self.cpu_count is None else min(self.cpu_count, usable)

    @property
    def granted(self) -> JobGrant:
        limited = bool(self.cpus) or self.cpu_count is not None or self.whole_node
        cpus = self.limit if limited else None
        reserved = len(set(self.cpus) & set(self.reserved))
        return JobGrant(cpus, self._granted_mib(cpus), reserved)

    def _granted_mib(self, cpus: int | None) -> int | None:
        room = sum(self.capacity(node.mem_mib) for node in self.machine.nodes)
        if self.mem_mib is not None:
            return min(self.mem_mib, room)
        if cpus is None or self.whole_node:
            return None if cpus is None else room
        there = len(self.machine.cpus)
        return room * min(self.cpu_count or cpus, there) // there

    def capacity(self, mib: int) -> int:
        """Return a NUMA node's memory, without its part of the memory reserved for the host."""
        whole = self.machine.mem_mib
        return mib - -(-self.reserve_mib * mib // whole) if whole else 0

    @property
    def is_exclusive(self) -> bool:
        """True if no other user can have guests on the node at the same time."""
        return self.exclusive and not self.cpus


@dataclass(frozen=True)
class Leases:
    """Resources that other jobs hold by open leases.

    Attributes:
        items: leased items by pool. Exclusive CPUs are in the pool ``core``.
        mib: leased MiB of the whole node.
        mib_on: leased MiB by NUMA node, where known.
        pages: MiB in huge pages, by (NUMA node, page size in KiB).
        shares: number of other jobs on each CPU.
        amounts: leased amounts of countable pools.
    """

    items: Mapping[str, frozenset[str]] = field(default_factory=dict)
    mib: int = 0
    mib_on: Mapping[int, int] = field(default_factory=dict)
    pages: Mapping[tuple[int, int], int] = field(default_factory=dict)
    shares: Mapping[int, int] = field(default_factory=dict)
    amounts: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def own(self) -> frozenset[int]:
        return frozenset(int(item) for item in self.items.get("core", ()))

    def leased_items(self, pool: str) -> frozenset[str]:
        """Return the items that jobs hold through this pool or another pool of its family."""
        mine = family(pool)
        return frozenset(
            item for name, items in self.items.items() if family(name) == mine for item in items
        )


@dataclass(frozen=True)
class FreeResources:
    """Resources of the job's share that no other job holds. All demands must fit into them."""

    share: NodeShare
    taken: Leases

    @cached_property
    def floating(self) -> frozenset[int]:
        """CPUs on which threads without exclusive CPUs run."""
        return frozenset(self.share.usable) - self.taken.own

    @cached_property
    def ownable(self) -> frozenset[int]:
        """CPUs that a guest can get exclusively."""
        others = {cpu for cpu, jobs in self.taken.shares.items() if jobs}
        return self.floating - others - set(self.share.reserved)

    @property
    def mib(self) -> int:
        """Free MiB of the whole node, in ordinary memory and huge pages."""
        share = self.share
        return max(0, share.machine.mem_mib - share.reserve_mib - self.taken.mib)

    def mib_on(self, node: NumaNode) -> int:
        return max(0, self.share.capacity(node.mem_mib) - self.taken.mib_on.get(node.id, 0))

    def pages_on(self, node: NumaNode) -> dict[int, int]:
        """Return the MiB in free huge pages of a NUMA node, by size in KiB."""
        pages = self.taken.pages
        return {
            kib: kib * count // 1024 - pages.get((node.id, kib), 0)
            for kib, count in node.pages.items()
        }

    def is_whole(self, group: tuple[int, ...]) -> bool:
        return len(group) == len(self.share.machine.siblings(group[0]))


def family(pool: str) -> str:
    """Return the common name of pools with the same items: ``pci`` of ``pci/vrdma``."""
    return pool.partition("/")[0]
