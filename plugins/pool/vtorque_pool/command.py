"""The commands ``vtorque pool``."""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from vtorque_admin.steps import Check
from vtorque_core.api import EXIT_FAILED, Refused, UsageError, printable
from vtorque_core.live.service import site_and_installation
from vtorque_pool import on_slurm, plot, show, slurm_conf, unit
from vtorque_pool import serve as service
from vtorque_pool import simulate as model
from vtorque_pool.hostlist import expand
from vtorque_pool.machines import Machines
from vtorque_pool.opening import become_owner, open_pool, require_state
from vtorque_pool.pbs import Pbs
from vtorque_pool.programs import begin
from vtorque_pool.settings import MachineShape, Settings
from vtorque_pool.slurm import Slurm

CONFIG = click.option(
    "--config", type=click.Path(readable=False, path_type=Path), help="Other config file."
)


def _open_pool(config: Path | None) -> tuple[Machines, Slurm | Pbs]:
    become_owner(config)
    site, machines = open_pool(config)
    settings: Settings = site[Settings]
    require_state(settings)
    return machines, Slurm(settings) if settings.batch == "slurm" else Pbs(settings)


def _pass_pool(command: Callable[..., None]) -> Callable[..., None]:
    def run(context: click.Context, /, config: Path | None, **given: Any) -> None:
        command(*_open_pool(config or context.obj), **given)

    functools.update_wrapper(run, command)
    return CONFIG(click.pass_context(run))


@click.group(invoke_without_command=True, short_help="Create and delete worker nodes on demand.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--metrics", is_flag=True, help="Print metrics for Prometheus.")
@CONFIG
@click.pass_context
def pool(context: click.Context, as_json: bool, metrics: bool, config: Path | None) -> None:
    """List nodes: state, age, idle time, cost per hour, jobs. Root and Slurm's user only."""
    if context.invoked_subcommand is None:
        _show_nodes(config, as_json, metrics)
    context.obj = config


def _show_nodes(config: Path | None, as_json: bool, metrics: bool) -> None:
    machines, batch = _open_pool(config)
    found, remembered, now = machines.list_machines(), machines.memory.read(), time.time()
    listed = show.rows(machines.settings, found, batch.nodes(), remembered.held, now)
    if metrics:
        click.echo(show.metrics(listed, found, remembered, now), nl=False)
    elif as_json:
        click.echo(json.dumps(show.data(listed, found, remembered, now), indent=2))
    else:
        for line in show.table(listed, found, remembered, now):
            click.echo(line)
    if found.silent:
        sys.exit(EXIT_FAILED)


@pool.command()
@CONFIG
@click.pass_context
def config(context: click.Context, config: Path | None) -> None:
    """Print the lines for slurm.conf. vtorque pool setup writes them."""
    settings = site_and_installation(config or context.obj)[0][Settings]
    if settings.batch != "slurm":
        raise UsageError(
            f"[plugin.pool] batch is {settings.batch}, but only slurm needs lines in slurm.conf"
        )
    for line in slurm_conf.lines(settings, Path(settings.slurm_conf)):
        click.echo(line)


@pool.command()
@CONFIG
@click.option("--undo", is_flag=True, help="Undo the setup.")
@click.option("--dry-run", is_flag=True, help="Print what would be done, without doing it.")
@click.pass_context
def setup(context: click.Context, config: Path | None, undo: bool, dry_run: bool) -> None:
    """Set up the pool on the host of slurmctld or pbs_server. Root only."""
    site, place = site_and_installation(config or context.obj)
    settings = site[Settings]
    slurm = settings.batch == "slurm"
    steps = slurm_conf.steps(settings, place) if slurm else unit.steps(place, "root")
    problems = [step.problem for step in steps if isinstance(step, Check) and not step.is_applied()]
    if problems and not undo and not dry_run:
        raise Refused("; ".join(problems) + ". Nothing was changed")
    for step in reversed(steps) if undo else steps:
        if isinstance(step, Check) or step.is_applied() != undo:
            continue
        click.echo(f"{'would ' if dry_run else ''}{'undo: ' if undo else ''}{step.text}")
        if not dry_run:
            step.undo() if undo else step.apply()
    for problem in problems if dry_run else ():
        click.echo(f"to do by hand: {problem}")


@pool.command()
@click.argument("nodes")
@click.option("--why", default="held by an administrator", help="Reason, shown by vtorque pool.")
@click.option("--end", is_flag=True, help="End the hold.")
@_pass_pool
def hold(machines: Machines, batch: Slurm | Pbs, nodes: str, why: str, end: bool) -> None:
    """Drain nodes, and keep their machines until vtorque pool destroy or the end of the hold."""
    names, why = _names(machines, nodes), printable(why)
    with machines.memory.edit() as remembered:
        for name in names:
            if end:
                remembered.held.pop(name, None)
            else:
                remembered.held[name] = why
    for name in names:
        machines.log(f"{name}: {'no longer held' if end else f'held: {why}'}")
        batch.undrain(name) if end else batch.drain(name, f"held: {why}")


@pool.command()
@click.argument("nodes")
@_pass_pool
def drain(machines: Machines, batch: Slurm | Pbs, nodes: str) -> None:
    """Start no new jobs on nodes, and delete their machines when the running jobs have ended."""
    names = _names(machines, nodes)
    for name in names:
        machines.log(f"{name}: drained by an administrator")
    batch.power_down(names, at_once=False)


@pool.command()
@click.argument("nodes")
@_pass_pool
def destroy(machines: Machines, batch: Slurm | Pbs, nodes: str) -> None:
    """Delete nodes' machines now, even after vtorque pool hold. The nodes' jobs are requeued."""
    names = _names(machines, nodes)
    with machines.memory.edit() as remembered:
        for name in names:
            remembered.held.pop(name, None)
    there = batch.nodes()
    batch.power_down([n for n in names if n in there and there[n].state != "off"], at_once=True)
    if failed := machines.end(names, "destroyed by an administrator", even_held=True):
        raise Refused(*(f"{name}: {problem}" for name, problem in failed.items()))


@pool.command()
@click.argument("shape")
@_pass_pool
def release(machines: Machines, batch: Slurm | Pbs, shape: str) -> None:
    """End the pause of a shape (kind of node), so that its machines are created again."""
    batch_release(machines, batch, _shape(machines.settings, shape))


def batch_release(machines: Machines, batch: Slurm | Pbs, shape: MachineShape) -> None:
    """End the pause of a shape (kind of node).

    On Slurm, also remove the reservation that keeps jobs off the shape's nodes.
    """
    if isinstance(batch, Slurm):
        on_slurm.release(machines, batch, shape.name)
        return
    with machines.memory.edit() as remembered:
        remembered.release(shape.name)
    machines.log(f"{shape.name}: retried by an administrator")


@pool.command()
@_pass_pool
def tidy(machines: Machines, batch: Slurm | Pbs) -> None:
    """Compare clouds and batch system once and repair differences, as vtorque pool serve does."""
    click.echo(f"{service.tidy(machines.settings, machines, batch)} differences repaired")


@pool.command()
@_pass_pool
def serve(machines: Machines, batch: Slurm | Pbs) -> None:
    """Repair the pool in rounds until SIGTERM. On Torque and OpenPBS, also grow and shrink it."""
    begin()
    service.serve(machines.settings, machines, batch)


@pool.command()
@click.argument("trace", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--nodes", default="8", help="Maximum number of nodes; a list (4,8) simulates each value."
)
@click.option(
    "--min-nodes",
    default="0",
    help="Number of idle nodes that are kept; a list simulates each value.",
)
@click.option(
    "--idle",
    default="600",
    help="Seconds after which an idle node is deleted; a list simulates each value.",
)
@click.option("--cpus", default=1, type=click.IntRange(1), help="CPUs of each node.")
@click.option(
    "--ready", default=120.0, type=click.FloatRange(0), help="Seconds until a new node is ready."
)
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
@click.option(
    "--html", type=click.Path(dir_okay=False, path_type=Path), help="Write a plot to this file."
)
def simulate(  # noqa: PLR0913 - one for each option
    trace: Path, nodes: str, min_nodes: str, idle: str, cpus: int, ready: float, as_json: bool,
    html: Path | None,
) -> None:  # fmt: skip
    """Estimate the jobs' wait times and the machine hours for a trace (SWF)."""
    jobs = model.read(trace)
    wanted = [
        model.Sizes(most, few, seconds, cpus, ready)
        for most in _counts(nodes)
        for few in _counts(min_nodes)
        for seconds in _counts(idle)
        if few <= most
    ]
    if not wanted:
        raise UsageError(f"--min-nodes {min_nodes} is more than --nodes {nodes}")
    results = [model.run(jobs, sizes) for sizes in wanted]
    if as_json:
        click.echo(json.dumps([each.data() for each in results], indent=2))
    else:
        for line in model.table(results):
            click.echo(line)
    if html is not None:
        html.write_text(plot.page(trace.name, len(jobs), results), encoding="utf-8")


def _counts(text: str) -> list[int]:
    words = text.split(",")
    if not all(word.isascii() and word.isdecimal() and len(word) < 9 for word in words):
        raise UsageError(f"{printable(text)!r} is not a list of numbers such as 0,4,8")
    return [int(word) for word in words]


def _names(machines: Machines, nodes: str) -> tuple[str, ...]:
    try:
        names = expand(nodes)
    except ValueError as error:
        raise Refused(str(error)) from None
    if unknown := [name for name in names if machines.settings.shape_of(name) is None]:
        raise Refused(f"{', '.join(unknown[:5])}: not a node of [plugin.pool]")
    return names


def _shape(settings: Settings, name: str) -> Any:
    for shape in settings.shapes:
        if shape.name == name:
            return shape
    known = ", ".join(shape.name for shape in settings.shapes)
    raise Refused(f"unknown shape {name!r}; known: {known}")
