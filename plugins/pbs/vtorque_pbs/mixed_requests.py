"""Mixed requests: jobs with guests on some nodes and bare metal on others. No I/O.

``+`` separates the parts of ``nodes=`` and ``select=``. Parts with the site's property get guests;
other parts are bare metal. If no part has the property, vsub adds the property to all parts.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from vtorque_core.api import Refused
from vtorque_core.api.batch_system import BareNode

_TRUE = frozenset({"true", "t", "yes", "y", "1"})  # OpenPBS, pbs_resources(7B), "boolean"
_NUMBER = re.compile(r"[0-9]{1,6}", re.ASCII)
_MOST_PARTS = 500  # for Torque: torque_places may recurse once per part


@dataclass(frozen=True)
class JobPart:
    """A part of a job on one node: its processes, and whether it has guests."""

    node: str
    slots: int
    guests: bool


def select_guest_parts(parts: Sequence[str], feature: str) -> list[bool]:
    """Return, for each part of a request, whether it gets guests.

    ``feature`` is the site's property for VM jobs; if it is empty, all parts get guests.
    """
    marked = [bool(feature) and any(_marks(w, feature) for w in part.split(":")) for part in parts]
    return marked if any(marked) else [True] * len(parts)


def _marks(word: str, feature: str) -> bool:
    name, equals, value = word.partition("=")
    return name == feature and (not equals or value.lower() in _TRUE)


def require_guests_first(guests: Sequence[bool]) -> None:
    """Raise Refused unless parts with guests come first, because the first part runs the script."""
    if list(guests) != sorted(guests, reverse=True):
        raise Refused(
            "a part on bare metal precedes a part with virtual machines",
            fix="write the parts with virtual machines first; the script runs in the first part",
        )


def torque_places(
    nodes: str, placed: Sequence[tuple[str, int]], feature: str, has: Mapping[str, Collection[str]]
) -> list[JobPart]:
    """Return the parts of a running job in the order of exec_host.

    Torque does not report which part of ``nodes=`` is on which node. It assigns each node in its
    list to the first part that fits, and reverses the order in exec_host (6.1.3, node_manager.c).
    This function may assign parts differently. Every assignment that fits is valid, and all nodes
    of the job compute the same assignment.

    Args:
        nodes: The job's ``Resource_List.nodes``.
        placed: Node name and number of processes of each item in exec_host.
        feature: The site's property of nodes with guests.
        has: Properties of each node.

    Raises:
        Refused: No assignment fits, for example because a scheduler merged two parts.
    """
    parts = nodes.partition("#")[0].split("+")
    wanted: list[tuple[int, frozenset[str], bool]] = []
    for part, guests in zip(parts, select_guest_parts(parts, feature), strict=True):
        first, *words = part.split(":")
        pairs = dict(word.split("=", 1) for word in words if "=" in word)
        plain = frozenset(word for word in words if "=" not in word)
        count = int(first) if _NUMBER.fullmatch(first) else 1
        names = frozenset() if _NUMBER.fullmatch(first) else frozenset({first})
        ppn = int(pairs["ppn"]) if _NUMBER.fullmatch(pairs.get("ppn", "")) else 1
        wanted += [(ppn, plain | names, guests)] * min(count, len(placed) + 1)
    wanted.sort(key=lambda each: not each[2])
    taken: dict[int, int] = {}  # index of a place: index of its part

    def take(part: int, seen: set[int]) -> bool:
        """Assign a part to a fitting item of exec_host, if necessary by moving other parts."""
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
        raise Refused(
            f"the request has {len(placed)} parts, and with parts on bare metal the limit is "
            f"{_MOST_PARTS}"
        )
    if len(wanted) != len(placed) or not all(take(part, set()) for part in range(len(wanted))):
        raise Refused(
            "Torque does not report which nodes have virtual machines in this request: use "
            "different numbers of processors (ppn) for the parts with virtual machines and those "
            "on bare metal"
        )
    return [JobPart(node, slots, wanted[taken[at]][2]) for at, (node, slots) in enumerate(placed)]


def openpbs_places(select: str, placed: Sequence[tuple[str, int]], feature: str) -> list[JobPart]:
    """Return the chunks of a running job in the order of exec_host.

    The chunks in ``select`` have the same order: the scheduler may place chunks in another order,
    but then sorts them as in ``select`` (23.06, node_info.cpp, ``seq_num``). A bare-metal chunk
    with ``mpiprocs`` has that number of processes, as in OpenPBS's node file. Other chunks have the
    number in exec_host.

    Args:
        select: The job's ``Resource_List.select``.
        placed: Node name and number of processes of each chunk in exec_host.
        feature: The site's boolean resource of nodes with guests.

    Raises:
        Refused: The numbers of chunks differ, or guests do not come first.
    """
    parts = select.split("+")
    its = select_guest_parts(parts, feature)
    if all(its):
        return [JobPart(node, slots, guests=True) for node, slots in placed]
    require_guests_first(its)
    wanted: list[tuple[bool, str]] = []
    for part, guests in zip(parts, its, strict=True):
        first = part.partition(":")[0]
        count = int(first) if _NUMBER.fullmatch(first) else 1
        mpi = re.search(r":mpiprocs=([1-9][0-9]{0,5})(?=:|$)", part, re.ASCII)
        wanted += [(guests, mpi[1] if mpi else "")] * min(count, len(placed) + 1)
    if len(wanted) != len(placed):
        raise Refused("exec_host and select have different numbers of chunks")
    return [
        JobPart(node, slots if guests or not mpi else int(mpi), guests)
        for (node, slots), (guests, mpi) in zip(placed, wanted, strict=True)
    ]


def per_node(places: Sequence[JobPart]) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return the nodes with guests, in the order of ``places``, and each node's process count."""
    slots: dict[str, int] = {}
    for place in places:
        if place.guests:
            slots[place.node] = slots.get(place.node, 0) + place.slots
    return tuple(slots), tuple(slots.values())


def bare_nodes(places: Sequence[JobPart]) -> tuple[BareNode, ...]:
    """Return the bare-metal nodes with their numbers of processes."""
    found = per_node([replace(place, guests=not place.guests) for place in places])
    return tuple(BareNode(node, slots) for node, slots in zip(*found, strict=True))
