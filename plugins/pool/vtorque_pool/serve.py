"""``vtorque pool serve``: repair and resize the pool in rounds, in one process at a time."""

from __future__ import annotations

import contextlib
import functools
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from vtorque_core.api import (
    Busy,
    HostFault,
    Refused,
    VtorqueError,
    closing,
    name_errors,
    replace_file,
    take_lock,
)
from vtorque_pool import on_slurm, rounds, show
from vtorque_pool.api import Machine
from vtorque_pool.machines import Machines, failures
from vtorque_pool.pbs import Pbs
from vtorque_pool.settings import Settings
from vtorque_pool.slurm import Slurm

_SLOWEST = 16  # maximum pause after failed rounds, as a multiple of the interval


def make_round(settings: Settings, machines: Machines, batch: Slurm | Pbs) -> Callable[[], int]:
    """Return a function that runs a round and returns the number of its actions."""
    since = rounds.NodeTimes()

    def one() -> int:
        if isinstance(batch, Slurm):
            return on_slurm.tidy(machines, batch)
        return _round(settings, machines, batch, since)

    return one


def serve(settings: Settings, machines: Machines, batch: Slurm | Pbs) -> None:
    """Run rounds until SIGTERM or SIGINT. Raises Refused if another process runs rounds."""
    with _hold_service_lock(machines):
        _serve(settings, machines, batch)


def tidy(settings: Settings, machines: Machines, batch: Slurm | Pbs) -> int:
    """Compare jobs and machines once, and create or delete machines; return the number of steps.

    Raises Refused if another process already does so.
    """
    with _hold_service_lock(machines):
        return make_round(settings, machines, batch)()


@contextlib.contextmanager
def _hold_service_lock(machines: Machines) -> Iterator[None]:
    with name_errors("vtorque pool serve or tidy is already running", Busy, fault=Refused):
        lock = take_lock(machines.memory.directory / "serve.lock", 0)
    with closing(lock):
        yield


def _serve(settings: Settings, machines: Machines, batch: Slurm | Pbs) -> None:
    ended = []
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, lambda *_: ended.append(True))
    one, pause = make_round(settings, machines, batch), settings.interval
    machines.log("service started")
    while not ended:
        try:
            one()
            _write_metrics(settings, machines, batch)
            pause = settings.interval
        except Exception as error:  # a defect in one round must not end the service
            said = error if isinstance(error, VtorqueError | OSError) else repr(error)
            machines.log(f"a round has failed: {said}")
            pause = min(pause * 2, settings.interval * _SLOWEST)
        end = time.monotonic() + pause
        while not ended and time.monotonic() < end:
            time.sleep(min(0.2, pause))
    machines.log("service stopped; nodes and machines are kept")


def _write_metrics(settings: Settings, machines: Machines, batch: Slurm | Pbs) -> None:
    if not settings.textfile:
        return
    found, remembered, now = machines.list_machines(), machines.memory.read(), time.time()
    listed = show.rows(settings, found, batch.nodes(), remembered.held, now)
    text = show.metrics(listed, found, remembered, now)
    replace_file(str(Path(settings.textfile)), text.encode(), mode=0o644)


def _round(settings: Settings, machines: Machines, batch: Pbs, since: rounds.NodeTimes) -> int:
    """Run a round on Torque or OpenPBS; return its number of actions.

    A failed action is logged, and repeated in the next round.
    """
    found, nodes, now = machines.list_machines(), batch.nodes(), time.time()
    for cloud, problem in found.silent.items():
        machines.log(f"{cloud} does not answer: {problem}")
    since.update(nodes, now)
    remembered = machines.memory.read()
    paused = frozenset(name for name in remembered.paused if remembered.is_paused(name, now))
    view = rounds.View(
        settings,
        found,
        nodes,
        batch.queued_jobs(),
        since,
        remembered.held,
        paused,
        remembered.seen,
        now,
    )
    on_slurm.record_start_times(machines, found, nodes, now)
    for problem in batch.make_known():
        machines.log(problem)
    wanted = rounds.steps(view)
    starts = [step for step in wanted if step.kind == "start"]
    failed = {}
    for step in wanted:
        if step.kind != "start":
            try:
                if _perform_step(machines, batch, step) and step.kind == "fail":
                    failed[step.node] = step.why
            except HostFault as error:
                machines.log(f"{step.node}: {step.kind} failed: {error}")
    if failed:
        machines.count_failures(failed)
    if starts:
        _start(machines, batch, starts)
    return len(wanted)


def _start(machines: Machines, batch: Pbs, starts: list[rounds.Step]) -> None:
    answers = machines.make([step.node for step in starts], starts[0].why)
    if failed := failures(answers):
        machines.count_failures(failed)
    for node, machine in answers.items():
        if isinstance(machine, Machine):
            _join(machines, batch, node, machine)


def _join(machines: Machines, batch: Pbs, node: str, machine: Machine) -> None:
    shape = machines.settings.shape_of(node)
    if shape is not None:
        batch.create(node, shape.cpus, shape.features, machine.address)


def _perform_step(machines: Machines, batch: Pbs, step: rounds.Step) -> bool:
    if step.kind == "end" and step.machine is not None:
        return not machines.end_machine(step.machine, step.why)
    machines.log(f"{step.node}: {step.kind}: {step.why}")
    if step.kind == "join" and step.machine is not None:
        _join(machines, batch, step.node, step.machine)
    elif step.kind == "drain":
        batch.drain(step.node, step.why)
    elif step.kind == "undrain":
        batch.undrain(step.node)
    elif step.kind == "requeue":
        nodes = batch.nodes()
        batch.requeue(nodes[step.node].jobs if step.node in nodes else ())
    elif step.kind in {"leave", "fail"}:
        deleted = functools.partial(_delete_node, batch, step)
        return not machines.end([step.node], step.why, still=deleted)
    return True


def _delete_node(batch: Pbs, step: rounds.Step) -> set[str]:
    """Delete a node from the batch system, so that the node gets no job before its machine ends.

    Returns a set with the node's name. If the node's state is not ``step.was``, deletes nothing and
    returns an empty set: Torque would also delete a node with jobs, and requeue or delete the jobs
    (req_manager.c).
    """
    if step.was is not None and batch.nodes().get(step.node) != step.was:
        return set()
    batch.delete(step.node)
    return {step.node}
