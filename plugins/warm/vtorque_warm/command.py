"""``vtorque warm``: show and control the warm guests of this node."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import click

from vtorque_core.api import UsageError, show_mib, tables
from vtorque_core.live import service, spares
from vtorque_core.live.spares import WarmGuest
from vtorque_warm.process import WarmService, end_all, ensure, read_status
from vtorque_warm.service import note


@click.group(invoke_without_command=True, short_help="Show and manage warm (pre-booted) guests.")
@click.option(
    "--config", type=click.Path(readable=False, path_type=Path), default=None, help="Site config."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def warm(context: click.Context, config: Path | None, as_json: bool) -> None:
    """Show the warm guests of this node, with age, size and state. Root only."""
    context.obj = config
    if context.invoked_subcommand is None:
        _require_root()
        _show(config, as_json)


def _require_root() -> None:
    if os.geteuid() != 0:
        raise UsageError("only root can run vtorque warm: ask your administrator")


def _show(config: Path | None, as_json: bool) -> None:
    paths = service.paths(config)
    runs = not WarmService.for_node(paths).is_lost()
    found = [_row(each) for each in spares.warm_guests(paths)]
    state = read_status(paths) if runs else {}
    if as_json:
        click.echo(json.dumps({"service": runs, "guests": found, **state}, indent=2))
        return
    columns = ("GUEST", "SHAPE", "STATE", "AGE", "MEMORY")
    rows = [
        (r["key"], r["shape"], r["state"], _age(r["seconds"]), show_mib(r["mib"])) for r in found
    ]
    notes = [f"{shape}: {why}" for shape, (_, _, why) in state.get("failures", {}).items()]
    if (left := state.get("rests", 0.0) - time.time()) > 0:
        notes.append(f"jobs need the memory of warm guests: none is booted for {_age(left)}")
    if not runs:
        notes.append("the service of warm guests is not running (vtorque warm start)")
    if not rows and not notes:
        click.echo("no warm guests")
    tables.show(columns, rows, notes, right=("AGE", "MEMORY"))


def _row(each: WarmGuest) -> dict[str, Any]:
    state = f"job {each.job}" if each.job else "waits" if each.waits else "starting or ending"
    return {
        "key": each.key,
        "shape": str(note(each).get("shape", "-")),
        "state": state,
        "seconds": round(max(0.0, time.time() - each.since), 1),
        "mib": each.mib,
    }


def _age(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


@warm.command(short_help="End warm guests.")
@click.argument("keys", metavar="[GUEST]...", nargs=-1)
@click.pass_obj
def drop(config: Path | None, keys: tuple[str, ...]) -> None:
    """End warm guests (default: all) that no job uses.

    The service of warm guests then boots new ones.
    """
    _require_root()
    paths = service.paths(config)
    known = [each.key for each in spares.warm_guests(paths)]
    for key in keys:
        if key not in known:
            raise UsageError(f"unknown warm guest {key}: vtorque warm lists all warm guests")
    for key in keys or known:
        click.echo(f"{key} {'ended' if spares.end(paths, key) else 'is in use by a job'}")


@warm.command(short_help="Start the service.")
@click.pass_obj
def start(config: Path | None) -> None:
    """Start the service that keeps warm guests, unless it is running."""
    _require_root()
    site, _ = service.site_and_installation(config)
    click.echo("started" if ensure(site.paths, site.path) else "the service is already running")


@warm.command(short_help="End the service and all warm guests.")
@click.pass_obj
def stop(config: Path | None) -> None:
    """End the service of warm guests, and all warm guests that no job uses.

    The next job restarts the service.
    """
    _require_root()
    end_all(service.paths(config))
