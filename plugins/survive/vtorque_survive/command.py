"""``vmgr suspend``, ``vmgr resume`` and ``vmgr checkpoint``."""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click

from vtorque_core.api import HostFault, Refused, kept_records, printable
from vtorque_core.live import service
from vtorque_survive import request
from vtorque_survive.migration_record import ELSEWHERE
from vtorque_survive.process import WatcherProcess

_WAIT = 60.0  # seconds for the watcher's answer
_SAVES = 3600.0  # seconds for a checkpoint
_AT_ONCE = 16  # nodes in parallel

_JOB = click.argument("job_id", metavar="JOB")
_HERE = click.option("--this-node", is_flag=True, hidden=True)


@click.command(short_help="Suspend a job: pause its guests and keep their memory.")
@_JOB
@_HERE
@click.pass_obj
def suspend(config: Path, job_id: str, this_node: bool) -> None:
    """Pause all guests of a job, on every node, until vmgr resume.

    For the job's owner and root. The batch system does not notice the pause, so the walltime
    continues. To free the job's CPUs for other jobs, use the batch system's own command (scontrol
    suspend, qsig -s suspend), which also pauses the guests.
    """
    _request_on_all(config, request.SUSPEND, job_id, this_node=this_node)


@click.command(short_help="Resume a job after vmgr suspend.")
@_JOB
@_HERE
@click.pass_obj
def resume(config: Path, job_id: str, this_node: bool) -> None:
    """Resume all guests of a job, on every node, and set their clocks."""
    _request_on_all(config, request.RESUME, job_id, this_node=this_node)


@click.command(short_help="Save a job as a checkpoint, to restore it later.")
@_JOB
@click.option("--stop", is_flag=True, help="End the job once it is saved.")
@_HERE
@click.pass_obj
def checkpoint(config: Path, job_id: str, stop: bool, this_node: bool) -> None:
    """Save a job's guests with memory and disks; print the checkpoint's id.

    For the job's owner and root. The guests are paused while they are saved. Then they continue,
    or end with --stop. When the job has ended, restore it with vsub -vm resume=ID and the job's
    other options. The new job must run on the same node or, if the site sets
    checkpoints_shared (Slurm only), on a node with equal software and a suitable processor.
    """
    word = request.CHECKPOINT if stop else request.SAVE
    place = _request_on_all(config, word, job_id, this_node=this_node, seconds=_SAVES)
    click.echo(request.last_checkpoint(place))


def _request_on_all(
    config: Path, word: str, job_id: str, *, this_node: bool, seconds: float = _WAIT
) -> kept_records.Place:
    """Send the request ``word`` to all the job's nodes. Return the job's kept records."""
    paths = service.paths(config)
    places = kept_records.find(paths, job_id, None if os.geteuid() == 0 else os.getuid())
    facts = places[-1].facts() if places else {}
    if not facts or "ended" in facts:
        raise Refused(
            f"job {printable(job_id)} does not run on this node, or belongs to another user"
        )
    if os.geteuid() == 0 and WatcherProcess.for_node(paths).is_lost():
        WatcherProcess.for_node(paths, config).create()
    nodes = facts.get("nodes", [])
    away = {facts.get("node"), *facts.get(ELSEWHERE, {})}  # this node's watcher forwards to these
    # The first node's watcher also starts the checkpoint on the other nodes.
    alone = this_node or word in (request.CHECKPOINT, request.SAVE)
    others = [] if alone else [str(node) for node in nodes if node not in away]
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        asked = [threads.submit(_request_on_node, config, word, job_id, node) for node in others]
        problems = [each.result() for each in asked]
    fifo = request.path_of(paths, places[-1].key)
    wrong = request.ask(fifo, places[-1], word, seconds)
    problems.append(wrong and f"{facts.get('node')}: {wrong}")
    if any(problems):
        raise HostFault(f"job {printable(job_id)}: {'; '.join(filter(None, problems))}")
    return places[-1]


def _request_on_node(config: Path, word: str, job_id: str, node: str) -> str:
    """Send the request ``word`` through ``vmgr`` on another node.

    Return an error message, empty on success.
    """
    argv = service.vmgr(config, word, "--this-node", "--node", node, "--", job_id)
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if done.returncode == 0:
        return ""
    said = done.stderr.decode("utf-8", "replace").strip().splitlines()
    return f"{node}: {printable(said[-1], 300) if said else f'exit code {done.returncode}'}"
