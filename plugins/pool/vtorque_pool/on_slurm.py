"""What Slurm's power saving calls, and a look at whether all is true. As SlurmUser.

Any of these may be killed anywhere, and called again: a start that has no machine is made again or
given up, a machine that no node has is ended.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping, Sequence

from vtorque_core.api import HostFault
from vtorque_pool.api import Machine
from vtorque_pool.machines import Found, Machines, failures
from vtorque_pool.slurm import Node, Slurm, State

_YOUNG = 30.0  # seconds: what the cloud has just made may not be in its list yet


def resume(machines: Machines, slurm: Slurm, nodes: Sequence[str]) -> int:
    """Make the nodes' machines; return the exit code. What has none is given up at once."""
    answers = machines.make(nodes, "Slurm resumes it")
    failed = failures(answers)
    give_up(machines, slurm, failed)
    for node, machine in answers.items():
        if isinstance(machine, Machine) and machine.address:
            try:
                slurm.address(node, machine.address)
            except HostFault as error:
                machines.log(f"{node}: its address {machine.address} is not told: {error}")
    return 1 if failed else 0


def suspend(machines: Machines, slurm: Slurm, nodes: Sequence[str]) -> int:
    """End the nodes' machines; return the exit code."""
    try:
        note_registered(machines, machines.found(), slurm.nodes())
    except HostFault as error:  # it only counts; machines end whoever is silent
        machines.log(f"not counted how long {', '.join(nodes)} took: {error}")
    return 1 if machines.end(nodes, "Slurm suspends it") else 0


def failed(machines: Machines, slurm: Slurm, nodes: Sequence[str]) -> int:
    """End machines that did not register in time, and let their nodes be started again."""
    why = f"no slurmd registered within {machines.settings.boot_timeout:g} s"
    problems = machines.end(nodes, why)
    give_up(machines, slurm, dict.fromkeys(nodes, why))
    return 1 if problems else 0


def give_up(machines: Machines, slurm: Slurm, nodes: dict[str, str]) -> None:
    """Count failures, pause shapes that fail again and again, have the jobs requeued."""
    if not nodes:
        return
    paused = machines.failed(nodes)
    slurm.fail(nodes)
    for name in paused:
        pause(machines, slurm, name)


def pause(machines: Machines, slurm: Slurm, name: str) -> None:
    """Have Slurm start no node of a shape; those that are up go on."""
    shape = next(each for each in machines.settings.shapes if each.name == name)
    nodes = slurm.nodes()
    up = {n for n in shape.names if n in nodes and nodes[n].state in {"free", "busy", "draining"}}
    slurm.pause(
        name,
        [n for n in shape.names if n not in up] or shape.names,
        machines.settings.failure_backoff,
    )


def release(machines: Machines, slurm: Slurm, name: str) -> None:
    """Try a paused shape again."""
    with machines.memory.changed() as remembered:
        remembered.release(name)
    slurm.unpause(name)
    machines.log(f"{name}: tried again, as an admin wants")


def note_registered(machines: Machines, found: Found, nodes: Mapping[str, Node]) -> None:
    """Note how long machines took until slurmd of their node began."""
    began = {node.name: node.since for node in nodes.values()}
    up = {name: node for name, node in nodes.items() if node.state != "off"}
    _note(machines, found, {n: began[n] for n in up if began[n]})


def note_up(machines: Machines, found: Found, nodes: Mapping[str, Node], now: float) -> None:
    """Note how long machines took, where the batch system does not say since when a node is up."""
    up = {n.name: now for n in nodes.values() if n.state in {"free", "busy", "draining"}}
    _note(machines, found, up)


def _note(machines: Machines, found: Found, when: Mapping[str, float]) -> None:
    """Note each machine whose node began after it was made, once; forget those that are gone."""
    known = machines.memory.read().seen
    new = [m for m in found.machines if m.id not in known and when.get(m.node, 0.0) >= m.created]
    gone = set() if found.silent else set(known) - {m.id for m in found.machines}
    if new or gone:
        with machines.memory.changed() as remembered:
            for machine in new:
                shape, began = machine.shape, when[machine.node]
                remembered.registered(machine.id, shape, machine.created, began)
            for each in gone:
                remembered.seen.pop(each, None)


def tidy(machines: Machines, slurm: Slurm) -> int:
    """Compare clouds and Slurm, and mend what differs; return how much was done.

    Nothing is done about nodes of a cloud that does not answer.
    """
    found, nodes = machines.found(), slurm.nodes()
    note_registered(machines, found, nodes)
    for cloud, problem in found.silent.items():
        machines.log(f"{cloud} does not answer: {problem}")
    return _end_needless(machines, slurm, found, nodes) + _mend_nodes(machines, slurm, found, nodes)


def _in_state(slurm: Slurm, state: State) -> set[str]:
    """Return the nodes that are so now: what a round has read can be old when it acts."""
    return {node.name for node in slurm.nodes().values() if node.state == state}


def _end_needless(machines: Machines, slurm: Slurm, found: Found, nodes: Mapping[str, Node]) -> int:
    """End machines that no node has or needs; return how many."""
    held = machines.memory.read().held
    done = 0
    for machine in found.machines:
        young = time.time() - machine.created < _YOUNG
        node = nodes.get(machine.node)
        if machine.state == "deleting" or machine.node in held or young:
            continue
        if machine.state == "ended" or machines.settings.shape_of(machine.node) is None:
            ended = machine.state == "ended"
            why = "it has ended" if ended else "no node of the pool has this name"
            machines.end_machine(machine, why)
        elif nodes and node is None:
            machines.end([machine.node], "Slurm has no such node")
        elif node is not None and node.state == "off" and not machines.is_busy(machine.node):
            off = functools.partial(_in_state, slurm, "off")
            machines.end([machine.node], "its node is off", still=off)
        else:
            continue
        done += 1
    return done


def _mend_nodes(machines: Machines, slurm: Slurm, found: Found, nodes: Mapping[str, Node]) -> int:
    """Make machines for starts that have none, give up nodes whose machine is gone; count them."""
    held = machines.memory.read().held
    again, lost = [], {}
    for name, node in nodes.items():
        shape = machines.settings.shape_of(name)
        if shape is None or shape.cloud in found.silent or machines.is_busy(name):
            continue
        has = bool(found.of(name))
        if node.state == "building" and not has:
            again.append(name)
        elif node.state == "unusable" and name not in held:
            if node.failed_to_start:
                lost[name] = "its start failed"
            elif not has and not node.is_down_by_hand:
                lost[name] = "its machine is gone"
    if again:
        machines.log(f"{', '.join(again)}: a start without machine goes on")
        resume(machines, slurm, again)
    if lost:
        down = functools.partial(_in_state, slurm, "unusable")
        for name in machines.end(lost, "its node is down", still=down):
            del lost[name]
        slurm.fail(lost)
        for name, why in lost.items():
            machines.log(f"{name}: down, and may be started again: {why}")
    return len(again) + len(lost)
