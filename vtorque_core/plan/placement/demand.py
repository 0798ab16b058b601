"""Pure functions that merge the claims of one guest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from vtorque_core.api.claims import (
    AmountClaim,
    CacheClaim,
    Claim,
    CoreClaim,
    MemoryClaim,
    PoolClaim,
    RamClaim,
)
from vtorque_core.api.host_topology import Topology
from vtorque_core.base.errors import Refused
from vtorque_core.base.sizes import show_mib

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
        whole: exclusive cores include their SMT siblings.
        mib: memory outside huge pages.
        paged_mib: memory in huge pages of ``page_kib``.
        ram_mib: the guest's own RAM, which is part of ``mib`` or ``paged_mib``.
        numa: binding to NUMA nodes; None: the node's default.
        ram_key, numa_key: ``-vm`` keys that request huge pages and NUMA placement.
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
    pools: tuple[PoolClaim, ...] = ()
    caches: tuple[CacheClaim, ...] = ()
    near: frozenset[int] = frozenset()
    amounts: tuple[AmountClaim, ...] = ()

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


def demand(claims: Sequence[Claim]) -> Demand:
    rams = [c for c in claims if isinstance(c, RamClaim)]
    page = _agree_on("huge pages", ((r.page_kib, r.key) for r in rams))
    numa: Numa | None = _agree_on("numa", [(r.numa, r.key) for r in rams])
    memory = [c for c in claims if isinstance(c, MemoryClaim)]
    if any(c.mib < 0 for c in memory):
        raise ValueError("a memory claim of less than nothing")
    ram = sum(c.mib for c in memory if c.use == RAM_USE)
    rest = sum(c.mib for c in memory) - ram
    cores = [c for c in claims if isinstance(c, CoreClaim)]
    pools = tuple(c for c in claims if isinstance(c, PoolClaim))
    amounts = tuple(c for c in claims if isinstance(c, AmountClaim))
    if any(c.amount < 0 for c in amounts):
        raise ValueError("a claim of less than nothing")
    for name in (c.pool for c in claims if isinstance(c, PoolClaim | AmountClaim)):
        if name.partition("/")[0] in OWN_POOLS:
            raise ValueError(f"pool {name} is the ledger's own")
    if page is not None and ram * 1024 % page:
        raise Refused(
            "the guest's RAM is not a whole number of huge pages",
            key="ram",
            value=show_mib(ram),
            limit=f"a multiple of {show_mib(max(1, page // 1024))}",
            fix="ask for more or less, or for no huge pages",
        )
    return Demand(
        cores={u: _cores([c for c in cores if c.use == u]) for u in USES if _has_use(cores, u)},
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
        caches=tuple(c for c in claims if isinstance(c, CacheClaim)),
        near=frozenset(node for r in rams for node in r.near),
        amounts=amounts,
    )


def _has_use(claims: Iterable[CoreClaim], use: str) -> bool:
    return any(c.use == use for c in claims)


def _cores(claims: Sequence[CoreClaim]) -> Cores:
    wanting = [c for c in claims if c.exclusive or c.cpus or c.whole_cores or c.at_most]
    key = (wanting or claims)[-1].key
    count = max(c.count for c in claims)
    most = min((c.at_most for c in claims if c.at_most is not None), default=count)
    if count < 1 or most < count:
        raise Refused(
            f"from {count} to {most} cores cannot be: the least is more than the most"
            if count >= 1
            else "a guest needs at least one core",
            key=key,
            value=str(count),
            limit=f"1 to {most}" if most >= 1 else None,
            fix="set the minimum to at most the maximum",
        )
    cpus = _agree_on("a mapping of CPUs", ((c.cpus or None, c.key) for c in claims)) or ()
    if cpus and (len(cpus) != count or len(set(cpus)) != count):
        raise Refused(
            f"the mapping must name {count} different CPUs",
            key=key,
            value=",".join(map(str, cpus)),
            limit=f"{count} CPUs",
            fix="write one CPU for each vCPU",
        )
    own = any(c.exclusive or c.cpus or c.whole_cores for c in claims)
    return Cores(count, own, most, cpus, key)


def _agree_on(what: str, opinions: Iterable[tuple[T | None, str]]) -> T | None:
    found = [(value, key) for value, key in opinions if value is not None]
    for value, key in found[1:]:
        if value != found[0][0]:
            raise Refused(
                f"{what}: {found[0][1]} wants {found[0][0]}, {key} wants {value}",
                key=key,
                value=str(value),
                fix="request only one of them",
            )
    return found[0][0] if found else None
