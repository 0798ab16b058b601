"""Decide what a round of ``vtorque pool serve`` changes on Torque or OpenPBS. No side effects.

Each round queries clouds and batch system anew; only :class:`NodeTimes` is kept between rounds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from vtorque_pool.api import Machine
from vtorque_pool.machines import CloudState
from vtorque_pool.pbs import QueuedJob
from vtorque_pool.settings import MachineShape, Settings
from vtorque_pool.slurm import REASON, TOLD, PoolNode

Kind = Literal["start", "join", "drain", "undrain", "requeue", "leave", "end", "fail"]


@dataclass(frozen=True)
class Step:
    """An action on a node, and its reason.

    Attributes:
        kind: The action. ``join`` creates the node of a machine, and ``end`` deletes a machine.
            ``leave`` and ``fail`` delete the node and its machine. ``fail`` also counts a failure
            of the node's shape.
        was: The node's state at the decision. If it has changed, the action is skipped.
    """

    kind: Kind
    node: str
    why: str
    machine: Machine | None = None
    was: PoolNode | None = None


@dataclass
class NodeTimes:
    """The Unix times at which nodes became idle or unusable."""

    idle: dict[str, float] = field(default_factory=dict)
    unusable: dict[str, float] = field(default_factory=dict)

    def update(self, nodes: Mapping[str, PoolNode], now: float) -> None:
        """Record ``now`` for nodes that became idle or unusable; delete the times of others."""
        for table, state in ((self.idle, "free"), (self.unusable, "unusable")):
            there = {node.name for node in nodes.values() if node.state == state}
            for name in set(table) - there:
                del table[name]
            for name in there:
                table.setdefault(name, now)


@dataclass(frozen=True)
class View:
    """The state of pool, clouds and batch system at the start of a round."""

    settings: Settings
    found: CloudState
    nodes: Mapping[str, PoolNode]
    waiting: Sequence[QueuedJob]
    since: NodeTimes
    held: Mapping[str, str]
    paused: frozenset[str]
    seen: Collection[str]
    """Ids of machines whose node has registered."""
    now: float


def steps(view: View) -> list[Step]:
    """Return a round's actions in order, but none for nodes of clouds that do not answer."""
    shapes = [s for s in view.settings.shapes if s.cloud not in view.found.silent]
    done = [*_end_unknown(view)]
    for shape in shapes:
        done += _mend(view, shape)
    touched = {step.node for step in done}
    wanted = _count_needed(view, shapes)
    starts = view.settings.max_creating - sum(len(_new_nodes(view, shape)) for shape in shapes)
    for shape in shapes:
        grown = list(_grow(view, shape, wanted[shape.name], starts, touched))
        starts -= sum(step.kind == "start" for step in grown)
        done += grown
        if not grown:
            done += _shrink(view, shape, wanted[shape.name], touched)
    return done


def _end_unknown(view: View) -> Iterator[Step]:
    for machine in view.found.machines:
        if machine.state == "deleting":
            continue
        if view.settings.shape_of(machine.node) is None:
            yield Step("end", machine.node, "no node of the pool has this name", machine)
        elif machine.state == "ended" and machine.node not in view.held:
            yield Step("end", machine.node, "the machine has ended", machine)
            if machine.id not in view.seen and not view.found.machines_of(machine.node):
                yield Step("fail", machine.node, "the machine ended before its node was up")
    for node in {m.node for m in view.found.machines if m.is_live}:
        if view.settings.shape_of(node) is not None:
            for extra in view.found.machines_of(node)[1:]:
                yield Step("end", node, "the node has another machine", extra)


def _mend(view: View, shape: MachineShape) -> Iterator[Step]:
    for name in shape.names:
        if name in view.held:
            continue
        node, machines = view.nodes.get(name), view.found.machines_of(name)
        if node is None and machines:
            yield Step("join", name, "the machine has no node", machines[0])
        elif node is not None and not machines:
            if node.jobs:
                yield Step("requeue", name, "the machine is gone")
            yield Step("leave", name, "the machine is gone")
        elif node is not None and node.state == "unusable":
            age = view.now - machines[0].created
            down = view.now - view.since.unusable.get(name, view.now)
            if age > view.settings.boot_timeout and down > view.settings.delete_timeout:
                if node.jobs:
                    yield Step("requeue", name, "the machine does not answer")
                if machines[0].id in view.seen:  # it was up: a user's job may have crashed it
                    yield Step("leave", name, "the machine does not answer", was=node)
                else:
                    yield Step("fail", name, f"the node is not up after {age:.0f} s", was=node)
        elif (
            node is not None
            and node.state == "draining"
            and not node.jobs
            and _is_drained_by_pool(node)
        ):
            yield Step("leave", name, "the node is drained and has no jobs", was=node)


def _is_drained_by_pool(node: PoolNode) -> bool:
    return node.reason.startswith(REASON)


def _count_needed(view: View, shapes: Sequence[MachineShape]) -> dict[str, int]:
    """Return how many nodes of each shape the queued jobs need.

    Each job counts for the first shape that fits it.
    """
    cpus = {shape.name: 0 for shape in shapes}
    nodes = {shape.name: 0 for shape in shapes}
    limits = {("queue", name): most for name, most in view.settings.queues.items()}
    limits |= {("account", name): most for name, most in view.settings.accounts.items()}
    used: Counter[tuple[str, str]] = Counter()
    for job in view.waiting:
        shape = next((s for s in shapes if _can_run(job, s)), None)
        if shape is None:
            continue
        counted = ("queue", job.queue), ("account", job.account)
        if any(used[each] + job.nodes > limits.get(each, math.inf) for each in counted):
            continue
        used.update(dict.fromkeys(counted, job.nodes))
        cpus[shape.name] += job.nodes * job.cpus
        nodes[shape.name] = max(nodes[shape.name], job.nodes)
    return {s.name: max(nodes[s.name], -(-cpus[s.name] // s.cpus)) for s in shapes}


def _can_run(job: QueuedJob, shape: MachineShape) -> bool:
    return (
        job.cpus <= shape.cpus
        and job.nodes <= len(shape.names)
        and job.features <= set(shape.features)
    )


def _new_nodes(view: View, shape: MachineShape) -> list[str]:
    """Return the nodes of a shape that have a machine but are not up."""
    return [
        name
        for name in shape.names
        if view.found.machines_of(name)
        and (name not in view.nodes or view.nodes[name].state == "unusable")
    ]


def _grow(
    view: View, shape: MachineShape, wanted: int, starts: int, touched: set[str]
) -> Iterator[Step]:
    """Yield actions that add nodes: return drained nodes to service, then create machines."""
    free = sum(_state(view, name) == "free" for name in shape.names)
    building = len(_new_nodes(view, shape))
    lacking = wanted - free - building
    for name in shape.names:
        node = view.nodes.get(name)
        if (
            lacking <= 0
            or node is None
            or node.state != "draining"
            or not _is_drained_by_pool(node)
        ):
            continue
        told = node.reason == f"{REASON}: {TOLD}"
        if name not in view.held and view.found.machines_of(name) and node.jobs and not told:
            yield Step("undrain", name, "jobs are waiting")
            lacking -= 1
    there = sum(bool(view.found.machines_of(name)) for name in shape.names)
    new = max(lacking, shape.min_nodes - there)
    why = f"waiting jobs need {wanted} nodes" if lacking > 0 else f"min_nodes is {shape.min_nodes}"
    if shape.name in view.paused:
        return
    able = [
        name
        for name in shape.names
        if name not in view.nodes
        and name not in touched
        and name not in view.held
        and not any(m.node == name for m in view.found.machines)
    ]
    for name in able[: max(0, min(new, starts))]:
        yield Step("start", name, why)


def _state(view: View, name: str) -> str:
    node = view.nodes.get(name)
    return node.state if node and view.found.machines_of(name) else ""


def _shrink(view: View, shape: MachineShape, wanted: int, touched: set[str]) -> Iterator[Step]:
    there = [n for n in shape.names if _state(view, n) in {"free", "busy", "unusable"}]
    idle = [
        name
        for name in there
        if _state(view, name) == "free"
        and name not in view.held
        and name not in touched
        and view.now - view.since.idle.get(name, view.now) > view.settings.idle_timeout
    ]
    free = sum(_state(view, name) == "free" for name in there)
    most = min(len(there) - shape.min_nodes, free - wanted)
    for name in reversed(idle[-most:] if most > 0 else []):
        yield Step("drain", name, f"idle for over {view.settings.idle_timeout:g} s")
