"""The programs that Slurm's power saving calls, and the repair of the pool. Runs as SlurmUser.

Each program may be killed at any point and repeated. :func:`tidy` creates missing machines, resets
nodes whose machine failed, and deletes machines that no node needs.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence

from vtorque_core.api import HostFault
from vtorque_pool.api import Machine
from vtorque_pool.machines import CloudState, Machines, failures
from vtorque_pool.slurm import PoolNode, Slurm, State

_YOUNG = 30.0  # seconds in which a new machine may be missing in the cloud's list


def resume(machines: Machines, slurm: Slurm, nodes: Sequence[str]) -> int:
    """Create the nodes' machines; return the exit status.

    Nodes without a machine are set down, so that Slurm requeues their jobs.
    """
    answers = machines.make(nodes, "Slurm resumes it")
    failed = failures(answers)
    record_failures(machines, slurm, failed)
    for node, machine in answers.items():
        if isinstance(machine, Machine) and machine.address:
            try:
                slurm.address(node, machine.address)
            except HostFault as error:
                machines.log(f"{node}: cannot set the node's address {machine.address}: {error}")
    return 1 if failed else 0


def suspend(machines: Machines, slurm: Slurm, nodes: Sequence[str]) -> int:
    """Delete the nodes' machines; return the exit status."""
    try:
        note_registered(machines, machines.list_machines(), slurm.nodes())
    except HostFault as error:  # affects only statistics
        machines.log(f"cannot record the start times of {', '.join(nodes)}: {error}")
    return 1 if machines.end(nodes, "Slurm suspends it") else 0


def delete_failed(machines: Machines, slurm: Slurm, nodes: Sequence[str]) -> int:
    """Delete machines that did not register in time, and allow another start of their nodes.

    Returns the exit status.
    """
    why = f"slurmd did not register within {machines.settings.boot_timeout:g} s"
    problems = machines.end(nodes, why)
    record_failures(machines, slurm, dict.fromkeys(nodes, why))
    return 1 if problems else 0


def record_failures(machines: Machines, slurm: Slurm, nodes: dict[str, str]) -> None:
    """Count failures, set the nodes down, and pause shapes that fail repeatedly.

    ``nodes`` maps nodes to reasons.
    """
    if not nodes:
        return
    paused = machines.count_failures(nodes)
    slurm.fail(nodes)
    for name in paused:
        pause(machines, slurm, name)


def pause(machines: Machines, slurm: Slurm, name: str) -> None:
    """Keep Slurm from starting nodes of the shape ``name`` for ``failure_backoff`` seconds."""
    shape = next(each for each in machines.settings.shapes if each.name == name)
    nodes = slurm.nodes()
    up = {n for n in shape.names if n in nodes and nodes[n].state in {"free", "busy", "draining"}}
    slurm.pause(
        name,
        [n for n in shape.names if n not in up] or shape.names,
        machines.settings.failure_backoff,
    )


def release(machines: Machines, slurm: Slurm, name: str) -> None:
    """Allow Slurm to start nodes of a paused shape again."""
    with machines.memory.edit() as remembered:
        remembered.release(name)
    slurm.unpause(name)
    machines.log(f"{name}: retried by an administrator")


def note_registered(machines: Machines, found: CloudState, nodes: Mapping[str, PoolNode]) -> None:
    """Record how long machines took from creation until slurmd started."""
    began = {node.name: node.since for node in nodes.values()}
    up = {name: node for name, node in nodes.items() if node.state != "off"}
    _note(machines, found, {n: began[n] for n in up if began[n]})


def record_start_times(
    machines: Machines, found: CloudState, nodes: Mapping[str, PoolNode], now: float
) -> None:
    """For each machine whose node is up at ``now``, record how long its start took.

    Used for batch systems that do not report when a node's daemon started.
    """
    up = {n.name: now for n in nodes.values() if n.state in {"free", "busy", "draining"}}
    _note(machines, found, up)


def _note(machines: Machines, found: CloudState, when: Mapping[str, float]) -> None:
    """Record when the nodes of new machines registered (``when``), and forget deleted machines."""
    known = machines.memory.read().seen
    new = [m for m in found.machines if m.id not in known and when.get(m.node, 0.0) >= m.created]
    gone = set() if found.silent else set(known) - {m.id for m in found.machines}
    if new or gone:
        with machines.memory.edit() as remembered:
            for machine in new:
                shape, began = machine.shape, when[machine.node]
                remembered.record_registration(machine.id, shape, machine.created, began)
            for each in gone:
                remembered.seen.pop(each, None)


def tidy(machines: Machines, slurm: Slurm) -> int:
    """Compare clouds and Slurm, repair differences, and return the number of repairs.

    Nodes of a cloud that does not answer are not changed.
    """
    found, nodes = machines.list_machines(), slurm.nodes()
    note_registered(machines, found, nodes)
    for cloud, problem in found.silent.items():
        machines.log(f"{cloud} does not answer: {problem}")
    return _end_needless(machines, slurm, found, nodes) + _mend_nodes(machines, slurm, found, nodes)


def _nodes_in_state(slurm: Slurm, state: State) -> set[str]:
    """Return the nodes in a state, from a new query, because the caller's list may be outdated."""
    return {node.name for node in slurm.nodes().values() if node.state == state}


def _end_needless(
    machines: Machines, slurm: Slurm, found: CloudState, nodes: Mapping[str, PoolNode]
) -> int:
    """Delete machines that have ended or whose node is off or unknown; return their number."""
    held = machines.memory.read().held
    done = 0
    for machine in found.machines:
        young = time.time() - machine.created < _YOUNG
        node = nodes.get(machine.node)
        if machine.state == "deleting" or machine.node in held or young:
            continue
        if machine.state == "ended" or machines.settings.shape_of(machine.node) is None:
            ended = machine.state == "ended"
            why = "the machine has ended" if ended else "no node of the pool has this name"
            machines.end_machine(machine, why)
        elif nodes and node is None:
            machines.end([machine.node], "the node does not exist in Slurm")
        elif node is not None and node.state == "off" and not machines.is_busy(machine.node):
            off = functools.partial(_nodes_in_state, slurm, "off")
            machines.end([machine.node], "the node is powered down", still=off)
        else:
            continue
        done += 1
    return done


def _mend_nodes(
    machines: Machines, slurm: Slurm, found: CloudState, nodes: Mapping[str, PoolNode]
) -> int:
    """Create missing machines of starting nodes, and reset nodes whose machine failed or is gone.

    Returns the number of repaired nodes.
    """
    held = machines.memory.read().held
    again, lost = [], {}
    for name, node in nodes.items():
        shape = machines.settings.shape_of(name)
        if shape is None or shape.cloud in found.silent or machines.is_busy(name):
            continue
        has = bool(found.machines_of(name))
        if node.state == "building" and not has:
            again.append(name)
        elif node.state == "unusable" and name not in held:
            if node.failed_to_start:
                lost[name] = "the start has failed"
            elif not has and not node.is_down_by_hand:
                lost[name] = "the machine is gone"
    if again:
        machines.log(f"{', '.join(again)}: retrying a start that has no machine")
        resume(machines, slurm, again)
    if lost:
        down = functools.partial(_nodes_in_state, slurm, "unusable")
        for name in machines.end(lost, "the node is down", still=down):
            del lost[name]
        slurm.fail(lost)
        for name, why in lost.items():
            machines.log(f"{name}: down, and can be started again: {why}")
    return len(again) + len(lost)
