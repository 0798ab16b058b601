"""``vtorque config``: check and show the site config. For all users."""

from __future__ import annotations

import json
import os
from pathlib import Path

import click

from vtorque_admin.example import effective_values, example
from vtorque_core.api import EXIT_FAILED, VtorqueError, require_root_owned
from vtorque_core.live.command_groups import PluginGroup, json_option
from vtorque_core.live.site_config import (
    CONFIG_PATH,
    Plugins,
    build,
    load,
    open_config,
    problems,
    site_templates,
)

_FILE = click.option(
    "--file",
    "path",
    type=click.Path(readable=False, path_type=Path),
    default=CONFIG_PATH,
    show_default=True,
    help="The config to read.",
)


@click.group(cls=PluginGroup, elsewhere={"vtorque-jobs": "explain"})
def config() -> None:
    """Check, show or explain the site config."""


@config.command()
@_FILE
@json_option
def check(path: Path, as_json: bool) -> None:
    """Report all problems of the config. Exit code 1 if there are any."""
    found: list[str]
    warnings: tuple[str, ...] = ()
    try:
        raw, plugins = open_config(path, node=True)
        found = problems(raw, plugins)
        if not found:
            site = build(raw, plugins, node=True)
            found, warnings = _template_problems(site.templates), site.warnings
        warnings += tuple(f"plugin {n} is disabled: {e}" for n, e in plugins.broken.items())
    except VtorqueError as error:
        found = [str(error)]
    if as_json:
        report = {"file": str(path), "problems": found, "warnings": list(warnings)}
        click.echo(json.dumps(report, indent=2))
    else:
        for line in found:
            click.echo(line, err=True)
        for line in warnings:
            click.echo(f"warning: {line}", err=True)
        if not found:
            note = "" if path.exists() else " (no such file: all defaults)"
            click.echo(f"{path}: ok{note}")
    if found:
        raise SystemExit(EXIT_FAILED)


def _template_problems(templates: Path) -> list[str]:
    found = []
    for path, replaced in site_templates(templates).items():
        if not replaced:
            found.append(f"{path}: no template has that name: none is replaced")
        try:
            require_root_owned(path, uid=os.geteuid())
        except VtorqueError as error:
            found.append(str(error))
    return found


@config.command()
@_FILE
@json_option
def show(path: Path, as_json: bool) -> None:
    """Print every value in effect and where it is set."""
    site, plugins = load(path, node=True)
    values = effective_values(site, plugins)
    templates = {str(path): what for path, what in site_templates(site.templates).items()}
    if as_json:
        listed = {
            key: {"value": v.value, "unit": v.unit, "origin": v.origin} for key, v in values.items()
        }
        report = {"file": str(path), "values": listed, "templates": templates}
        click.echo(json.dumps(report, indent=2))
        return
    lines = [(f"{key} = {v.text}", v.origin) for key, v in values.items()]
    lines += [(file, f"in place of {what or 'nothing'}") for file, what in templates.items()]
    width = min(60, max(len(line) for line, _ in lines))
    for line, origin in lines:
        click.echo(f"{line:{width}}  # {origin}")


@config.command("example")
def print_example() -> None:
    """Print a commented config with every key, its default, unit and meaning."""
    click.echo(example(Plugins.load(node=True)), nl=False)
