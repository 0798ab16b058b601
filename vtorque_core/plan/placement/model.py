"""Guests' demands, a job's share of a node, and other jobs' leases."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, TypeVar

from vtorque_core.api import claims
from vtorque_core.api.host_topology import NumaNode, Topology
from vtorque_core.base.errors import Refusal, Refused
from vtorque_core.base.sizes import show_mib
from vtorque_core.config.job_size import JobGrant


class NoFit(Exception):
    """Claims that do not fit. The caller raises Refused or a host fault instead."""

    def __init__(self, message: str, **parts: str | None) -> None:
        self.refusal = Refusal(message, **parts)
        super().__init__(str(self.refusal))


@dataclass(frozen=True)
class NodeShare:
    """The job's allocation on this node, and the node's hardware.

    Attributes:
        cpus: host CPU ids of the job; empty: unknown.
        reserve_cores, reserve_mib: reserved for the host. If ``cpus`` is known, guests may
            share the reserved CPUs, but no guest gets them exclusively.
        exclusive: no other user's guests may use the node. Ignored if ``cpus`` is known.
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
        """Reserved CPUs: those with the lowest ids, and their SMT siblings."""
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
        """True if the batch system grants only a number of CPUs; vTorque chooses them."""
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
        """Return the part of a NUMA node's ``mib`` that is not reserved for the host."""
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
        mib: leased MiB of the whole node, outside huge pages.
        mib_on: ``mib`` by NUMA node, where known.
        pages: MiB in huge pages, by (NUMA node, page size in KiB).
        shares: number of other jobs on each CPU.
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
        """Return the leased items of this pool, and of pools with the same :func:`family`."""
        mine = family(pool)
        return frozenset(
            item for name, items in self.items.items() if family(name) == mine for item in items
        )


@dataclass(frozen=True)
class FreeResources:
    """Resources that the job may use on this node and that no other job holds."""

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
        """Free MiB of the whole node, outside huge pages."""
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


T = TypeVar("T")

Numa = Literal["preferred", "strict"]
RAM_USE = "guest"
USES = ("vcpu", "io", "emulator")  # in the order in which they get cores
OWN_POOLS = frozenset({"core", "memory", "node", "share", "cache"})


@dataclass(frozen=True)
class Cores:
    count: int
    own: bool = False
    most: int = 0
    cpus: tuple[int, ...] = ()
    key: str = "vcpus"


@dataclass(frozen=True)
class Demand:
    """Merged claims of one guest.

    Attributes:
        whole: exclusive CPUs include their SMT siblings.
        mib: memory outside huge pages.
        paged_mib: memory in huge pages of ``page_kib``.
        ram_mib: the guest's own RAM, which is part of ``mib`` or ``paged_mib``.
        numa: binding to NUMA nodes; None: the node's default.
        ram_key: ``-vm`` key that requests huge pages.
        numa_key: ``-vm`` key that requests NUMA placement.
        largest: MiB and key of the largest memory claim except QEMU's.
        near: preferred NUMA nodes.
    """

    cores: dict[str, Cores] = field(default_factory=dict)
    whole: bool = False
    mib: int = 0
    paged_mib: int = 0
    ram_mib: int = 0
    page_kib: int | None = None
    numa: Numa | None = None
    ram_key: str = "ram"
    numa_key: str = "ram"
    largest: tuple[int, str] = (0, "ram")
    pools: tuple[claims.PoolClaim, ...] = ()
    caches: tuple[claims.CacheClaim, ...] = ()
    near: frozenset[int] = frozenset()
    amounts: tuple[claims.AmountClaim, ...] = ()

    @property
    def own(self) -> int:
        return sum(c.count for c in self.cores.values() if c.own)

    @property
    def open_own(self) -> int:
        """Number of exclusive CPUs for which the user requested no CPU ids."""
        return sum(c.count for c in self.cores.values() if c.own and not c.cpus)

    @property
    def fixed(self) -> tuple[int, ...]:
        return tuple(cpu for cores in self.cores.values() for cpu in cores.cpus)

    @property
    def own_key(self) -> str:
        """``-vm`` key that requests exclusive CPUs."""
        return next((c.key for c in self.cores.values() if c.own), "vcpus")

    def idle_siblings(self, machine: Topology) -> tuple[int, ...]:
        """Return the SMT siblings that stay idle if a guest requests whole cores by CPU id."""
        cores = [machine.siblings(cpu) for cpu in self.fixed] if self.whole else []
        return tuple(sorted({cpu for core in cores for cpu in core} - set(self.fixed)))

    @property
    def shared(self) -> int:
        """Number of shared CPUs that the guest needs: its largest claim that is not exclusive."""
        return max((c.count for c in self.cores.values() if not c.own), default=0)

    @property
    def memory_mib(self) -> int:
        return self.mib + self.paged_mib


def demand(wanted: Sequence[claims.Claim]) -> Demand:
    rams = [c for c in wanted if isinstance(c, claims.RamClaim)]
    page = _agree_on("huge pages", ((r.page_kib, r.key) for r in rams))
    numa: Numa | None = _agree_on("numa", [(r.numa, r.key) for r in rams])
    memory = [c for c in wanted if isinstance(c, claims.MemoryClaim)]
    if any(c.mib < 0 for c in memory):
        raise ValueError("a claim for memory is negative")
    ram = sum(c.mib for c in memory if c.use == RAM_USE)
    rest = sum(c.mib for c in memory) - ram
    cores = [c for c in wanted if isinstance(c, claims.CoreClaim)]
    pools = tuple(c for c in wanted if isinstance(c, claims.PoolClaim))
    amounts = tuple(c for c in wanted if isinstance(c, claims.AmountClaim))
    if any(c.amount < 0 for c in amounts):
        raise ValueError("a claim for a pool has a negative amount")
    for name in (c.pool for c in wanted if isinstance(c, claims.PoolClaim | claims.AmountClaim)):
        if name.partition("/")[0] in OWN_POOLS:
            raise ValueError(f"the pool name {name} is reserved for vTorque")
    if page is not None and ram * 1024 % page:
        raise Refused(
            "the guest's RAM is not a whole number of huge pages",
            key="ram",
            value=show_mib(ram),
            limit=f"a multiple of {show_mib(max(1, page // 1024))}",
            fix="ask for a multiple of the page size, or for no huge pages",
        )
    uses = [use for use in USES if any(c.use == use for c in cores)]
    return Demand(
        cores={u: _cores([c for c in cores if c.use == u]) for u in uses},
        whole=any(c.whole_cores for c in cores),
        mib=rest if page is not None else rest + ram,
        paged_mib=0 if page is None else ram,
        ram_mib=ram,
        page_kib=page,
        numa=numa,
        ram_key=next((r.key for r in rams if r.page_kib), "ram"),
        numa_key=next((r.key for r in rams if r.numa), "ram"),
        largest=max(((c.mib, c.key) for c in memory if c.use != "emulator"), default=(0, "ram")),
        pools=pools,
        caches=tuple(c for c in wanted if isinstance(c, claims.CacheClaim)),
        near=frozenset(node for r in rams for node in r.near),
        amounts=amounts,
    )


def _cores(wanted: Sequence[claims.CoreClaim]) -> Cores:
    wanting = [c for c in wanted if c.exclusive or c.cpus or c.whole_cores or c.at_most]
    key = (wanting or wanted)[-1].key
    count = max(c.count for c in wanted)
    most = min((c.at_most for c in wanted if c.at_most is not None), default=count)
    if count < 1 or most < count:
        raise Refused(
            f"the minimum of {count} cores is more than the maximum of {most}"
            if count >= 1
            else "a guest needs at least one core",
            key=key,
            value=str(count),
            limit=f"1 to {most}" if most >= 1 else None,
            fix="lower the minimum or raise the maximum",
        )
    cpus = _agree_on("a mapping of CPUs", ((c.cpus or None, c.key) for c in wanted)) or ()
    if cpus and (len(cpus) != count or len(set(cpus)) != count):
        raise Refused(
            f"the CPU mapping has {len(cpus)} CPUs ({len(set(cpus))} different) for {count} vCPUs",
            key=key,
            value=",".join(map(str, cpus)),
            limit=f"{count} CPUs",
            fix="write one CPU for each vCPU",
        )
    own = any(c.exclusive or c.cpus or c.whole_cores for c in wanted)
    return Cores(count, own, most, cpus, key)


def _agree_on(topic: str, opinions: Iterable[tuple[T | None, str]]) -> T | None:
    found = [(value, key) for value, key in opinions if value is not None]
    for value, key in found[1:]:
        if value != found[0][0]:
            raise Refused(
                f"{topic}: {found[0][1]} wants {found[0][0]}, {key} wants {value}",
                key=key,
                value=str(value),
                fix="request only one of these values",
            )
    return found[0][0] if found else None
