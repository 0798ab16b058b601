"""Mixed requests: which parts of a job have guests, and which of its nodes these are. Pure.

A part of ``nodes=`` or ``select=`` that has the site's property is for guests, all others are bare
metal; where none has it all are for guests, as vsub then asks for.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from vtorque_core.api import Refused
from vtorque_core.api.batch_system import BareNode

_TRUE = frozenset({"true", "t", "yes", "y", "1"})  # OpenPBS, pbs_resources(7B), "boolean"
_NUMBER = re.compile(r"[0-9]{1,6}", re.ASCII)
_MOST_PARTS = 500  # of Torque's: finding their nodes may take a call within another for each


@dataclass(frozen=True)
class Place:
    """A part of a job on one of its nodes, with how many processes, for guests or not."""

    node: str
    slots: int
    guests: bool


def for_guests(parts: Sequence[str], feature: str) -> list[bool]:
    """Return of each part of a request whether it is for guests. ``feature``: "" has none."""
    marked = [bool(feature) and any(_marks(w, feature) for w in part.split(":")) for part in parts]
    return marked if any(marked) else [True] * len(parts)


def _marks(word: str, feature: str) -> bool:
    name, equals, value = word.partition("=")
    return name == feature and (not equals or value.lower() in _TRUE)


def require_guests_first(guests: Sequence[bool]) -> None:
    """Raise Refused unless the parts with guests come first: the script runs in the first one."""
    if list(guests) != sorted(guests, reverse=True):
        raise Refused(
            "a part on bare metal stands before one with virtual machines",
            fix="write the parts with virtual machines first; the script runs in the first one",
        )


def torque_places(
    nodes: str, placed: Sequence[tuple[str, int]], feature: str, has: Mapping[str, Collection[str]]
) -> list[Place]:
    """Return the parts of a running job in the order of exec_host.

    Torque does not say which part of ``nodes=`` is where: without names of nodes it goes through
    its list of nodes and gives each to the first part that fits, and exec_host has them the other
    way round (6.1.3, node_manager.c). Any part that fits is as good as the server's own choice, and
    all nodes of the job choose the same one, the parts with guests first.

    Args:
        nodes: the job's ``Resource_List.nodes``.
        placed: name and processes of each item of exec_host.
        feature: the property.
        has: the nodes' properties.

    Raises Refused if they do not fit each other, as where a scheduler puts two parts together.
    """
    parts = nodes.partition("#")[0].split("+")
    wanted: list[tuple[int, frozenset[str], bool]] = []
    for part, guests in zip(parts, for_guests(parts, feature), strict=True):
        first, *words = part.split(":")
        pairs = dict(word.split("=", 1) for word in words if "=" in word)
        plain = frozenset(word for word in words if "=" not in word)
        count = int(first) if _NUMBER.fullmatch(first) else 1
        names = frozenset() if _NUMBER.fullmatch(first) else frozenset({first})
        ppn = int(pairs["ppn"]) if _NUMBER.fullmatch(pairs.get("ppn", "")) else 1
        wanted += [(ppn, plain | names, guests)] * min(count, len(placed) + 1)
    wanted.sort(key=lambda each: not each[2])
    taken: dict[int, int] = {}  # a place's number: the part's

    def take(part: int, seen: set[int]) -> bool:
        """Give a part a place: the first free one, or one whose part can have another."""
        ppn, words, _ = wanted[part]
        fitting = [
            at
            for at, (node, slots) in enumerate(placed)
            if at not in seen and slots == ppn and words <= {node, *has.get(node, ())}
        ]
        for at in sorted(fitting, key=lambda at: at in taken):
            if at in seen:
                continue
            seen.add(at)
            if at not in taken or take(taken[at], seen):
                taken[at] = part
                return True
        return False

    if len(placed) > _MOST_PARTS:
        raise Refused(f"a request with bare metal may have {_MOST_PARTS} parts, not {len(placed)}")
    if len(wanted) != len(placed) or not all(take(part, set()) for part in range(len(wanted))):
        raise Refused(
            "Torque does not tell where this request's parts with virtual machines are: give them "
            "another number of processors (ppn) than those on bare metal"
        )
    return [Place(node, slots, wanted[taken[at]][2]) for at, (node, slots) in enumerate(placed)]


def openpbs_places(select: str, placed: Sequence[tuple[str, int]], feature: str) -> list[Place]:
    """Return the chunks of a running job, which exec_host has in the order of its request.

    The scheduler sorts them so (23.06, node_info.cpp, ``seq_num``). Of a chunk on bare metal its
    ``mpiprocs`` count, as in OpenPBS's own node file. Raises Refused.
    """
    parts = select.split("+")
    its = for_guests(parts, feature)
    if all(its):
        return [Place(node, slots, guests=True) for node, slots in placed]
    require_guests_first(its)
    wanted: list[tuple[bool, str]] = []
    for part, guests in zip(parts, its, strict=True):
        first = part.partition(":")[0]
        count = int(first) if _NUMBER.fullmatch(first) else 1
        mpi = re.search(r":mpiprocs=([1-9][0-9]{0,5})(?=:|$)", part, re.ASCII)
        wanted += [(guests, mpi[1] if mpi else "")] * min(count, len(placed) + 1)
    if len(wanted) != len(placed):
        raise Refused("exec_host has another number of chunks than select")
    return [
        Place(node, slots if guests or not mpi else int(mpi), guests)
        for (node, slots), (guests, mpi) in zip(placed, wanted, strict=True)
    ]


def per_node(places: Sequence[Place]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return the nodes with guests, first one first, and the processes that these parts have."""
    slots: dict[str, int] = {}
    for place in places:
        if place.guests:
            slots[place.node] = slots.get(place.node, 0) + place.slots
    return tuple(slots), tuple(slots.values())


def bare_nodes(places: Sequence[Place]) -> tuple[BareNode, ...]:
    """Return the nodes without guests, each with all its processes."""
    found = per_node([replace(place, guests=not place.guests) for place in places])
    return tuple(BareNode(node, slots) for node, slots in zip(*found, strict=True))
