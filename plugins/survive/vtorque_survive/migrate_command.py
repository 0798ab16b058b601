"""``vmgr migrate``, and the hidden command that root on another node runs here."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from vtorque_core.api import EXIT_FAILED, UsageError, VtorqueError, printable
from vtorque_survive import arrival, migration


@click.command(short_help="Migrate a job's running guests to another node; root only.")
@click.argument("job_id", metavar="JOB")
@click.option("--to", required=True, metavar="NODE", help="The destination node.")
@click.option("--resolve", is_flag=True, hidden=True)
@click.pass_obj
def migrate(config: Path, job_id: str, to: str, resolve: bool) -> None:
    """Migrate the guests that a job has on this node to another node. Root only.

    Guests on the job's first node cannot be migrated, because the job shell runs there. Needs
    Slurm: a placeholder job of root reserves the guests' cores and memory on the destination. After
    the migration, Slurm can give the source node to other jobs. With exit code 1, the last line
    reports the reason and the nodes on which the guests run.
    """
    if os.geteuid() != 0:
        raise UsageError("only root can run vmgr migrate: ask your administrator")
    try:
        here = migration.ThisNode.from_config(config)
        if resolve:
            migration.resolve_all(here, job_id)
        else:
            migration.migrate(here, job_id, to)
    except VtorqueError as error:
        click.echo(f"vmgr: job {printable(job_id)}: {error}", err=True)
        sys.exit(EXIT_FAILED)


@click.command("arrival", hidden=True)
@click.pass_obj
def answer_source(config: Path) -> None:
    """Answer a request from another node about a guest that migrates between the nodes."""
    if os.geteuid() != 0:
        raise UsageError(
            "this command is internal: only root of another node runs it for a migration"
        )
    asked, said = sys.stdin.buffer, sys.stdout.buffer
    said.write(
        arrival.answer(
            migration.ThisNode.from_config(config), asked.readline(arrival.MOST), asked, said
        )
    )
