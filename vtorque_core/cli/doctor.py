"""``vtorque doctor``: check if this node can run jobs."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from itertools import chain
from pathlib import Path

import click

from vtorque_core.cli.lazy import config_option, json_option

_MARKS = {"ok": ("ok", "green"), "warning": ("warn", "yellow"), "failed": ("FAIL", "red")}


@click.command(short_help="Check this node, and print how to fix each failure.")
@config_option
@click.option("--user", default=None, help="Also check the requirements of this user's jobs.")
@click.option("--mark", is_flag=True, help="Set or clear the node property that VM jobs request.")
@json_option
def doctor(config: Path, user: str | None, mark: bool, as_json: bool) -> None:
    """Check libvirt, acceleration, network, images, permissions, plugins and the hooks.

    With --mark the batch system then starts VM jobs here only if nothing has failed.
    Exit codes: 0 all well (maybe with warnings), 1 something failed, 2 the site config is wrong.
    """
    from vtorque_core.node.admin.doctor import Finding, examine, set_mark  # noqa: PLC0415
    from vtorque_core.site.load import load  # noqa: PLC0415

    site, plugins = load(config, node=True)
    findings: list[Finding] = []
    last = set_mark(site, plugins, findings) if mark else ()  # a generator: it runs last
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
