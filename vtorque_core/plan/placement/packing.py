"""Choose the NUMA node and the cores of each guest.

The search minimizes the number of guests that cross NUMA nodes, and distributes guests over them.
If the search takes too long, each guest gets the first NUMA node on which it fits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from vtorque_core.plan.placement.model import Demand, FreeResources

_STEPS = 3000  # of the search; about 0.3 s on a machine of 128 CPUs, under the node's lock

Groups = tuple[tuple[int, ...], ...]
"""The free CPUs of each physical core."""


@dataclass(frozen=True)
class Cut:
    cpus: tuple[int, ...]
    idle: tuple[int, ...]
    rest: Groups


@dataclass(frozen=True)
class Room:
    """Free resources of a NUMA node during placement.

    Attributes:
        groups: CPUs that a guest can get exclusively, by physical core.
        mib: ordinary memory.
        pages: MiB of huge pages by size in KiB.
        floating: number of shared CPUs, minus the number of vCPUs that already use them.
    """

    id: int
    groups: Groups
    mib: int
    pages: Mapping[int, int] = field(default_factory=dict)
    floating: int = 0
    guests: int = 0

    @property
    def shape(self) -> tuple[object, ...]:
        """Key that is equal for NUMA nodes with equal free resources."""
        sizes = tuple(sorted(len(group) for group in self.groups))
        return sizes, self.mib, tuple(sorted(self.pages.items())), self.floating


def pick_cpus(
    groups: Groups, count: int, whole: bool, full: Callable[[tuple[int, ...]], bool]
) -> Cut | None:
    """Return ``count`` CPUs with SMT siblings adjacent, or None if there are too few.

    Uses whole cores (``full``) first, then divided cores. With ``whole``, uses only whole cores and
    leaves their unused siblings idle.
    """
    fulls = [group for group in groups if full(group)]
    parts = [group for group in groups if not full(group)]
    got: list[int] = []
    idle: tuple[int, ...] = ()
    while len(got) < count:
        left = count - len(got)
        fitting = next((group for group in fulls if len(group) <= left), None)
        if fitting is not None:
            fulls.remove(fitting)
            got += fitting
            continue
        source = fulls if whole or not parts else parts
        if not source:
            return None
        chosen = min(source, key=lambda g: (abs(len(g) - left), g))
        source.remove(chosen)
        got += chosen[:left]
        if whole:
            idle = chosen[left:]
        elif chosen[left:]:
            parts.append(chosen[left:])
    return Cut(tuple(got), idle, tuple(sorted((*fulls, *parts))))


def misfits(d: Demand, free: FreeResources) -> dict[int, int]:
    """Count for each NUMA node a guest's preferences that the node does not meet."""
    result: Counter[int] = Counter()
    nodes = free.share.machine.nodes
    for node in nodes if d.near else ():
        result[node.id] = int(node.id not in d.near)
    for claim in d.pools:
        items = set(claim.items) - free.taken.leased_items(claim.pool)
        for node in nodes if claim.near else ():
            here = sum(claim.near.get(item, node.id) == node.id for item in items)
            result[node.id] += max(0, claim.count - here)
    return dict(result)


@dataclass
class Search:
    """Search for a NUMA node for each guest.

    Attributes:
        fixed_nodes: NUMA nodes of the CPUs that each guest requests by id.
        misfits: for each guest, the number of unmet preferences by NUMA node.
        strict: for each guest, True if it must not cross NUMA nodes.
    """

    demands: Sequence[Demand]
    full: Callable[[tuple[int, ...]], bool]
    fixed_nodes: Sequence[tuple[int, ...]]
    misfits: Sequence[Mapping[int, int]]
    strict: Sequence[bool]
    steps: int = 0
    dead: set[object] = field(default_factory=set)

    def homes(self, rooms: Sequence[Room]) -> dict[int, int] | None:
        """Return the NUMA node of each guest that fits on one NUMA node.

        Returns None if a guest that must not cross NUMA nodes fits on none.
        """
        order = sorted(range(len(self.demands)), key=self._rank)
        must = sum(len(nodes) > 1 for nodes in self.fixed_nodes)
        for crossing in range(must, len(order) + 1):
            found = self._search(order, tuple(rooms), crossing)
            if found is not None:
                return found
            if self.steps > _STEPS:
                return self._greedy(order, tuple(rooms))
        return None

    def _rank(self, guest: int) -> tuple[object, ...]:
        d = self.demands[guest]
        pinned = bool(self.fixed_nodes[guest])
        return not pinned, not self.strict[guest], not d.whole, -d.own, -d.memory_mib, guest

    def _search(
        self, order: Sequence[int], rooms: tuple[Room, ...], crossing: int
    ) -> dict[int, int] | None:
        if not order:
            return {}
        self.steps += 1
        key = (len(order), crossing, tuple(sorted(map(repr, (room.shape for room in rooms)))))
        named = any(self.fixed_nodes[guest] for guest in order)
        if self.steps > _STEPS or (not named and key in self.dead):
            return None
        guest = order[0]
        for at, after in self._options(guest, rooms):
            rest = self._search(order[1:], after, crossing)
            if rest is not None:
                return {guest: at, **rest}
        if crossing and not self.strict[guest]:
            rest = self._search(order[1:], rooms, crossing - 1)
            if rest is not None:
                return rest
        self.dead.add(key)
        return None

    def _greedy(self, order: Sequence[int], rooms: tuple[Room, ...]) -> dict[int, int] | None:
        homes: dict[int, int] = {}
        for guest in order:
            best = next(self._options(guest, rooms), None)
            if best is not None:
                homes[guest], rooms = best
            elif self.strict[guest]:
                return None
        return homes

    def _options(
        self, guest: int, rooms: tuple[Room, ...]
    ) -> Iterator[tuple[int, tuple[Room, ...]]]:
        d = self.demands[guest]

        def rank(pair: tuple[Room, Room]) -> tuple[int, ...]:
            room = pair[0]
            free = sum(map(len, room.groups)) if d.own else -room.floating
            return room.guests, self.misfits[guest].get(room.id, 0), free, room.mib, room.id

        fitting = [(room, after) for room in rooms if (after := self._fit(guest, d, room))]
        for room, after in sorted(fitting, key=rank):
            yield room.id, tuple(after if r.id == room.id else r for r in rooms)

    def _fit(self, guest: int, d: Demand, room: Room) -> Room | None:
        nodes = self.fixed_nodes[guest]
        if nodes and nodes != (room.id,):
            return None
        paged = room.pages.get(d.page_kib, 0) if d.page_kib else 0
        if d.mib > room.mib or d.paged_mib > paged:
            return None
        got = pick_cpus(room.groups, d.open_own, d.whole, self.full)
        if got is None:
            return None
        vcpu = d.cores.get("vcpu")
        sharing = vcpu.count if vcpu is not None and not vcpu.own else 0
        floating = room.floating - len(got.cpus) - len(got.idle) - sharing
        if sharing and floating < 0:
            return None
        pages = {**room.pages, d.page_kib: paged - d.paged_mib} if d.page_kib else room.pages
        return replace(
            room, groups=got.rest, mib=room.mib - d.mib, pages=pages, floating=floating,
            guests=room.guests + 1,
        )  # fmt: skip
