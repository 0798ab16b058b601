"""``vtorque setup`` and ``vtorque doctor``."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from itertools import chain
from pathlib import Path

import click

from vtorque_admin import setup as steps
from vtorque_admin import setup_batch
from vtorque_admin.doctor import Finding, examine, set_mark
from vtorque_core.api import UsageError
from vtorque_core.live.command_groups import config_option, json_option
from vtorque_core.live.site_config import load

_MARKS = {"ok": ("ok", "green"), "warning": ("warn", "yellow"), "failed": ("FAIL", "red")}


@click.group()
def setup() -> None:
    """Prepare this node for guests, or undo the preparation."""


def _require_root() -> None:
    if os.geteuid() != 0:
        raise UsageError("vtorque setup changes the node: run it as root")


@setup.command()
@config_option
@click.option("--batch", help="Batch system of the site.  [default: that of the config]")
@click.option("--dry-run", is_flag=True, help="Print what would be done, without doing it.")
@click.option("--secret-from-stdin", is_flag=True, hidden=True)
def install(config: Path, batch: str | None, dry_run: bool, secret_from_stdin: bool) -> None:
    """Create directories, site secret, network, commands and the batch system's hooks.

    Also sets the batch system in the config.

    Idempotent: completed steps are skipped. If a step fails, fix the problem that it reports and
    run the command again. Exit code 0 when the node is ready.
    """
    _require_root()
    site, plugins = load(config, node=True, new=True)
    batch = site.batch.system if batch is None else batch
    plugins.batch_system(batch)
    given = sys.stdin.buffer.read(1 << 16) if secret_from_stdin else None
    steps.install(site, click.echo, secret=given, dry_run=dry_run)
    setup_batch.install(site, plugins, config, batch, click.echo, dry_run=dry_run)


@setup.command()
@config_option
@click.option("--purge", is_flag=True, help="Also remove images, the site secret and the config.")
def uninstall(config: Path, purge: bool) -> None:
    """Remove hooks, runtime directories, the guests' network and the links to the commands.

    Restores the files that the installation changed, byte for byte. Files that were edited
    afterwards are kept and reported. Fails while jobs run.
    """
    _require_root()
    site, plugins = load(config, node=True, new=True)
    steps.require_idle(site, spares=False)
    setup_batch.uninstall(site, plugins, config, click.echo)
    steps.require_idle(site)
    steps.uninstall(site, config, click.echo, purge=purge)


@click.command(short_help="Check this node, and print how to fix each failure.")
@config_option
@click.option("--user", default=None, help="Also check the requirements of this user's jobs.")
@click.option("--mark", is_flag=True, help="Set or clear the node property that VM jobs request.")
@json_option
def doctor(config: Path, user: str | None, mark: bool, as_json: bool) -> None:
    """Check libvirt, acceleration, network, images, permissions, plugins and the hooks.

    With --mark, the batch system afterwards starts VM jobs on this node only if no check failed.
    Exit codes: 0 no check failed (warnings are possible), 1 a check failed, 2 the site config is
    invalid.
    """
    site, plugins = load(config, node=True)
    findings: list[Finding] = []
    last = set_mark(site, plugins, findings) if mark else ()  # a generator: runs after the checks
    for finding in chain(examine(site, plugins, user, marks=mark), last):
        findings.append(finding)
        if not as_json:
            word, colour = _MARKS[finding.status]
            click.secho(f"{word:5}", fg=colour, nl=False)
            click.echo(f"{finding.check}: {finding.message}")
            if finding.fix and finding.status != "ok":
                click.echo(f"      -> {finding.fix}")
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    sys.exit(int(any(finding.status == "failed" for finding in findings)))
