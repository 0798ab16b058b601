"""Pure functions that place a job's guests on a node.

First :mod:`packing` chooses a NUMA node for each guest. Then the guests get exclusive and shared
CPUs, then memory, and finally caches and pool items.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from vtorque_core.api.claims import Claim, Placement
from vtorque_core.plan.placement.model import (
    Demand,
    FreeResources,
    Leases,
    NodeShare,
    NoFit,
    demand,
)
from vtorque_core.plan.placement.packing import Cut, Room, Search, misfits, pick_cpus
from vtorque_core.plan.placement.pool_items import CacheShare, amounts, caches, pools
from vtorque_core.plan.placement.refusals import check_memory, check_numa, require_fit


def divide(claims: Sequence[Sequence[Claim]], share: NodeShare, taken: Leases) -> list[Placement]:
    """Return a placement for each guest. Raises NoFit, or Refused for contradicting claims."""
    demands = [demand(guest) for guest in claims]
    free = FreeResources(share, taken)
    require_fit(demands, free)
    rooms = _rooms(demands, free)
    homes = _homes(demands, free, rooms)
    cuts = _cuts(demands, free, homes, rooms)
    return _Division(demands, free, homes, cuts, rooms).placements()


def _rooms(demands: Sequence[Demand], free: FreeResources) -> list[Room]:
    machine, taken = free.share.machine, free.taken
    named = {cpu for d in demands for cpu in (*d.fixed, *d.idle_siblings(machine))}
    rooms = []
    for node in machine.nodes:
        mine = [tuple(c for c in core if c in node.cpus) for core in machine.cores]
        groups = tuple(tuple(c for c in core if c in free.ownable - named) for core in mine)
        rooms.append(
            Room(
                id=node.id,
                groups=tuple(group for group in groups if group),
                mib=free.mib_on(node),
                pages=free.pages_on(node),
                floating=len((free.floating - named) & set(node.cpus)),
            )
        )
    return _reserve_unplaced(rooms, taken.mib - sum(taken.mib_on.values()))


def _reserve_unplaced(rooms: list[Room], mib: int) -> list[Room]:
    while mib > 0 and any(room.mib for room in rooms):
        most = max(rooms, key=lambda room: room.mib)
        part = min(mib, most.mib)
        rooms = [replace(r, mib=r.mib - part) if r is most else r for r in rooms]
        mib -= part
    return rooms


def _homes(demands: Sequence[Demand], free: FreeResources, rooms: list[Room]) -> dict[int, int]:
    share = free.share
    strict = [(d.numa or share.numa) == "strict" for d in demands]
    search = Search(
        demands=demands,
        full=free.is_whole,
        fixed_nodes=[share.machine.nodes_of(d.fixed) for d in demands],
        misfits=[misfits(d, free) for d in demands],
        strict=strict,
    )
    homes = search.homes(rooms)
    if homes is None:
        check_numa(demands, strict, rooms)
    return homes or {}


def _cuts(
    demands: Sequence[Demand], free: FreeResources, homes: Mapping[int, int], rooms: Sequence[Room]
) -> list[Cut]:
    groups = {room.id: room.groups for room in rooms}
    cuts: dict[int, Cut] = {}
    for guest, home in homes.items():
        d = demands[guest]
        cut = pick_cpus(groups[home], d.open_own, d.whole, free.is_whole)
        assert cut is not None  # noqa: S101 - the search found it
        groups[home], cuts[guest] = cut.rest, cut
    for guest, d in enumerate(demands):
        if guest in homes:
            continue
        order = sorted(groups, key=lambda n: (-sum(map(len, groups[n])), n))
        joined = tuple(group for node in order for group in groups[node])
        cut = pick_cpus(joined, d.open_own, d.whole, free.is_whole)
        if cut is None:
            raise NoFit(
                f"the job has too few free whole cores for a guest of {d.own} CPUs",
                key=d.own_key,
                value=str(d.own),
                limit=f"{sum(len(g) for g in joined if free.is_whole(g))} CPUs in free whole cores",
                where="the job's allocation",
                fix="ask the batch system for whole cores, or for more cores",
            )
        cuts[guest] = cut
        left = {c for group in cut.rest for c in group}
        groups = {
            n: tuple(p for g in parts if (p := tuple(c for c in g if c in left)))
            for n, parts in groups.items()
        }
    beside = [d.idle_siblings(free.share.machine) for d in demands]
    return [replace(cuts[g], idle=(*cuts[g].idle, *beside[g])) for g in range(len(demands))]


class _Division:
    def __init__(
        self,
        demands: Sequence[Demand],
        free: FreeResources,
        homes: Mapping[int, int],
        cuts: Sequence[Cut],
        rooms: Sequence[Room],
    ) -> None:
        self.demands, self.free, self.homes = demands, free, homes
        self.cuts, self.rooms = cuts, rooms
        self.share, self.taken = free.share, free.taken
        self.machine = free.share.machine
        self.own = {c for cut in cuts for c in (*cut.cpus, *cut.idle)}
        self.own |= {cpu for d in demands for cpu in d.fixed}

    def placements(self) -> list[Placement]:
        self._check_count()
        self.floating = self._floating()
        guests = range(len(self.demands))
        memory = self._memory()
        nodes = [self._nodes(guest) for guest in guests]
        vcpus = [self._own_vcpus(guest) for guest in guests]
        leased = pools(self.demands, self.free, nodes)
        counted = amounts(self.demands, self.free)
        cached = caches(self.demands, self.free, vcpus)
        return list(map(self._placement, guests, memory, leased, counted, cached))

    def _check_count(self) -> None:
        if self.share.cpu_count is not None and len(self.own) > self.share.limit:
            d = next(d for d in self.demands if d.whole)
            raise NoFit(
                f"the guests need {len(self.own)} CPUs including SMT siblings: the job has fewer",
                key=d.own_key,
                value=str(d.own),
                limit=f"{self.share.limit} CPUs",
                where="the job's allocation",
                fix="ask the batch system for more CPUs per node",
            )

    def _floating(self) -> tuple[int, ...]:
        free = [c for c in self.share.usable if c in self.free.floating and c not in self.own]
        if not self.share.is_count_only:
            return tuple(free)
        room = self.share.limit - len(self.own)
        chosen: list[int] = []
        homes = [self.homes.get(guest) for guest in range(len(self.demands))]
        wants = [(h, d.shared) for h, d in zip(homes, self.demands, strict=True)]
        for home, count in (*wants, *((home, room) for home in dict.fromkeys(homes))):
            costs = sorted(self._cost(cpu, home) for cpu in free if cpu not in chosen)
            chosen += [cost[-1] for cost in costs[: min(count, room - len(chosen))]]
        return tuple(sorted(chosen))

    def _cost(self, cpu: int, home: int | None) -> tuple[int, bool, int, tuple[int, ...], int]:
        away = home is not None and self.machine.nodes_of((cpu,)) != (home,)
        core = self.machine.siblings(cpu)
        crowd = self.taken.shares.get(cpu, 0)
        return crowd, away, sum(self.taken.shares.get(c, 0) for c in core), core, cpu

    def _near(self, guest: int) -> tuple[int, ...]:
        home = self.homes.get(guest)
        if home is None:
            return self.floating
        near = tuple(c for c in self.floating if self.machine.nodes_of((c,)) == (home,))
        return near if len(near) >= max(1, self.demands[guest].shared) else self.floating

    def _cores(self, guest: int) -> dict[str, tuple[int, ...]]:
        d, near = self.demands[guest], self._near(guest)
        pieces = list(self.cuts[guest].cpus)
        cores: dict[str, tuple[int, ...]] = {}
        for use, wanted in d.cores.items():
            if wanted.cpus:
                cores[use] = wanted.cpus
            elif wanted.own:
                cores[use], pieces = tuple(pieces[: wanted.count]), pieces[wanted.count :]
            else:
                cores[use] = near
        if "emulator" not in cores:
            cores["emulator"] = cores.get("io") or near or cores.get("vcpu", ())
        return cores

    def _own_vcpus(self, guest: int) -> tuple[int, ...]:
        vcpu = self.demands[guest].cores.get("vcpu")
        return self._cores(guest)["vcpu"] if vcpu is not None and vcpu.own else ()

    def _nodes(self, guest: int) -> tuple[int, ...]:
        if guest in self.homes:
            return (self.homes[guest],)
        own = (*self.cuts[guest].cpus, *self.demands[guest].fixed)
        return self.machine.nodes_of(own or self.floating)

    def _memory(self) -> list[tuple[dict[int, int], dict[int, int]]]:
        free = {room.id: room.mib for room in self.rooms}
        huge = {room.id: dict(room.pages) for room in self.rooms}
        result: list[tuple[dict[int, int], dict[int, int]]] = [({}, {}) for _ in self.demands]
        for guest in (*self.homes, *(g for g in range(len(result)) if g not in self.homes)):
            d, nodes = self.demands[guest], self._nodes(guest)
            page = d.page_kib or 0
            spread = _spread(d.mib, free, nodes, 1)
            pages = {node: sizes.get(page, 0) for node, sizes in huge.items()}
            paged = _spread(d.paged_mib, pages, nodes, max(1, page // 1024))
            if sum(spread.values()) < d.mib or sum(paged.values()) < d.paged_mib:
                check_memory(self.demands, self.free, always=True)
            for node in free:
                free[node] -= spread.get(node, 0)
                huge[node][page] = pages[node] - paged.get(node, 0)
            result[guest] = spread, paged
        return result

    def _placement(
        self,
        guest: int,
        memory: tuple[dict[int, int], dict[int, int]],
        leased: dict[str, tuple[str, ...]],
        counted: dict[str, int],
        cached: CacheShare,
    ) -> Placement:
        d, share = self.demands[guest], self.share
        plain, paged = memory
        total = {n: plain.get(n, 0) + paged.get(n, 0) for n in {*plain, *paged}}
        cores = self._cores(guest)
        own = frozenset(use for use, wanted in d.cores.items() if wanted.own)
        alone = self._own_vcpus(guest)
        parts, cache_items = cached
        everything = set(share.machine.cpus)
        if not share.cpus:  # the whole node is no restriction
            shared = {u for u, c in cores.items() if u not in own and set(c) == everything}
            cores = {use: () if use in shared else c for use, c in cores.items()}
        mine = tuple(sorted({*self.floating, *self.own}))
        crossing = guest not in self.homes
        several = len(self.machine.nodes) > 1
        return Placement(
            cores=cores,
            own=own,
            share=() if not share.cpus and set(mine) == everything else mine,
            memory_mib=d.memory_mib,
            leased={**leased, **cache_items},
            nodes=self._nodes(guest) if several else (),
            memory=plain,
            paged=paged,
            numa=(d.numa or share.numa) if several and (own or not crossing) else None,
            page_kib=d.page_kib,
            threads=self._threads(alone) if alone else 1,
            caches=parts,
            amounts=counted,
            idle=self.cuts[guest].idle,
            most={use: c.most for use, c in d.cores.items() if c.own and c.most > c.count},
            growing=tuple(c for c in self.floating if c in self.free.ownable),
            cells=self._cells(d, alone, total) if crossing and alone else (),
        )

    def _cells(
        self, d: Demand, vcpus: tuple[int, ...], memory: Mapping[int, int]
    ) -> tuple[tuple[int, tuple[int, ...], int], ...]:
        nodes = self.machine.nodes_of(vcpus)
        ram = _spread(d.ram_mib, memory, nodes, max(1, (d.page_kib or 0) // 1024))
        if len(nodes) == 1 or set(ram) != set(nodes) or sum(ram.values()) != d.ram_mib:
            return ()
        on = [self.machine.nodes_of((cpu,))[0] for cpu in vcpus]
        return tuple(
            (node, tuple(i for i, at in enumerate(on) if at == node), ram[node]) for node in nodes
        )

    def _threads(self, cores: tuple[int, ...]) -> int:
        size = len(self.machine.siblings(cores[0]))
        parts = [cores[i : i + size] for i in range(0, len(cores), size)]
        alike = all(tuple(sorted(p)) == tuple(sorted(self.machine.siblings(p[0]))) for p in parts)
        return size if alike else 1


def _spread(need: int, free: Mapping[int, int], near: Sequence[int], step: int) -> dict[int, int]:
    """Divide MiB among NUMA nodes: equally on near nodes, the rest on nodes with most free MiB.

    The sum may be less than ``need``.
    """
    free = {**dict.fromkeys(near, 0), **free}
    result = dict.fromkeys(free, 0)
    for index, node in enumerate(near):
        part = (need - sum(result.values())) // (len(near) - index)
        result[node] = min(part, free[node]) // step * step
    for node in sorted(free, key=lambda n: (n not in near, -free[n], n)):
        left = need - sum(result.values())
        result[node] += min(left, max(0, free[node] - result[node])) // step * step
    return {node: mib for node, mib in result.items() if mib}
