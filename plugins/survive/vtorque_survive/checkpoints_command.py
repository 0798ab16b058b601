"""``vmgr checkpoints``: list and remove the checkpoints on this node."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

import click

from vtorque_core.api import (
    Paths,
    Refused,
    UsageError,
    name_errors,
    printable,
    show_mib,
    tables,
)
from vtorque_core.live import service
from vtorque_survive import listing
from vtorque_survive.listing import ListedCheckpoint
from vtorque_survive.resume_options import checkpoint_id
from vtorque_survive.settings import Settings
from vtorque_survive.stored import Store

_STALE = 150.0  # seconds; with a job on the node, the list is written every minute
_WAIT = 60.0  # seconds for the watcher to remove a checkpoint
_COLUMNS = ("ID", "JOB", "AGE", "SIZE", "NODE")


@click.group(invoke_without_command=True, short_help="List or remove checkpoints of jobs.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def checkpoints(context: click.Context, as_json: bool) -> None:
    """List your checkpoints on this node, oldest first; as root, those of all users."""
    if context.invoked_subcommand is not None:
        return
    found = list(_find_checkpoints(context.obj))
    if as_json:
        click.echo(json.dumps([asdict(each) for each in found], indent=2))
        return
    root = os.geteuid() == 0
    rows = [_row(each, root=root) for each in found]
    tables.show((*_COLUMNS, "OWNER") if root else _COLUMNS, rows, right=("AGE", "SIZE"))


@checkpoints.command(short_help="Remove a checkpoint. The job can no longer be restored from it.")
@click.argument("name", metavar="ID")
@click.option(
    "--uid",
    type=int,
    help="Uid of the owner; for root, if several users have a checkpoint with this id.",
)
@click.pass_obj
def remove(config: Path, name: str, uid: int | None) -> None:
    """Remove one of your checkpoints on this node; as root, a checkpoint of any user.

    Without root, this works only while a job with guests is on the node: root's watcher process
    then removes the checkpoint.
    """
    try:
        checkpoint_id(name)
    except ValueError as error:
        raise UsageError(f"{printable(name)} {error}") from None
    paths = service.paths(config)
    if os.geteuid():
        listing.ask(paths, os.getuid(), name, _WAIT)
        return
    found = [each for each in _stores(config) if each.has(name) and uid in (None, each.uid)]
    if len(found) > 1:
        uids = " or ".join(str(each.uid) for each in found)
        raise Refused(f"several users have a checkpoint {name}: choose one with --uid {uids}")
    if not found:
        raise Refused(f"there is no checkpoint {name} on this node; vmgr checkpoints lists all")
    listing.remove(found[0], name)
    _publish(paths, found[0])


def _find_checkpoints(config: Path) -> Iterator[ListedCheckpoint]:
    if os.geteuid():
        paths = service.paths(config)
        yield from listing.read_list(paths, os.getuid())
        site, _ = service.batch_system(config)
        old = listing.age(paths, os.getuid())
        if site[Settings].checkpoints_shared and old > _STALE:
            click.echo(
                f"vmgr: this list is {timedelta(seconds=int(old))} old. Other nodes may have "
                "saved or removed checkpoints since. The list is updated while a job with guests "
                "runs on this node.",
                err=True,
            )
        return
    for store in _stores(config):
        yield from listing.entries(store)


def _stores(config: Path) -> Iterator[Store]:
    site, _ = service.batch_system(config)
    top = site[Settings].checkpoints
    return listing.stores(Path(top)) if top else iter(())


def _publish(paths: Paths, store: Store) -> None:
    with name_errors("cannot update the owner's checkpoint list"):
        listing.publish(paths, store)


def _row(each: ListedCheckpoint, *, root: bool) -> tuple[str, ...]:
    age = timedelta(seconds=int(time.time() - each.made))
    row = (each.id, each.job, str(age), show_mib(each.size >> 20), each.node)
    return (*row, each.owner) if root else row
