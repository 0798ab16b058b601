"""``vtorque drain``: accept no new jobs on this node, and migrate or requeue the present ones."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

import click

from vtorque_core.api import EXIT_FAILED, Refused, UsageError, printable
from vtorque_core.live.command_groups import config_option, json_option
from vtorque_survive.drain import LEFT, Drain, DrainResult


@click.command(
    short_help="Drain this node: accept no new jobs, migrate or requeue the present ones."
)
@click.argument("node", metavar="NODE")
@config_option
@click.option(
    "--reason",
    default="by its admin",
    help="Reason for the drain, for the batch system and the jobs' logs.",
)
@click.option(
    "--dry-run", is_flag=True, help="Print what would be done with each job, without doing it."
)
@json_option
@click.option("--in-turn", is_flag=True, hidden=True)
def drain(
    node: str, config: Path, reason: str, dry_run: bool, as_json: bool, in_turn: bool
) -> None:
    """Drain this node: accept no new jobs, and migrate or requeue the present ones. Root only.

    Run it on the node itself. Each job is migrated to a spare node, saved and requeued, or left
    running. A line per job reports the action. To undo the drain, use the batch system's own
    command.

    The exit code is 0 if no job with guests stays on the node, or 1 if a job was left running. If
    nothing was done, the exit code is 2 (drain refused) or 122 (no answer from the batch system).
    """
    if os.geteuid() != 0:
        raise UsageError("only root can drain a node: ask your administrator")
    its = Drain.from_config(config, reason, in_turn=in_turn)
    if not its.is_this_node(node):
        name = printable(node)
        raise Refused(
            f"this node is not {name}: run the command on that node as root: ssh {name} vtorque "
            f"drain {name}"
        )
    done = []
    for each in its.plan() if dry_run else its.run():
        done.append(each)
        if not as_json:
            click.echo(_line(each, "would be " if dry_run else ""))
    if as_json:
        click.echo(json.dumps([asdict(each) for each in done], indent=2))
    elif not done:
        click.echo("no job with guests runs on this node")
    sys.exit(EXIT_FAILED if any(each.done == LEFT for each in done) else 0)


def _line(each: DrainResult, would: str) -> str:
    what = "left running" if each.done == LEFT else each.done
    return f"{each.job} ({each.owner}): {would}{what}: {each.why}"
