"""``vtorque config check|show|example``. Mounted lazily by ``vtorque``; any user may call it."""

from __future__ import annotations

import json
from pathlib import Path

import click

from vtorque_core.config import CONFIG_PATH, Site, build, plugins_config, problems, read_toml
from vtorque_core.config_example import effective, example
from vtorque_core.errors import EXIT_FAILED, VtorqueError
from vtorque_core.plugins import Plugins

_FILE = click.option(
    "--file",
    "path",
    type=click.Path(path_type=Path),
    default=CONFIG_PATH,
    show_default=True,
    help="The config to read.",
)
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


@click.group()
def config() -> None:
    """Check, show or explain the site config."""


@config.command()
@_FILE
@_JSON
def check(path: Path, as_json: bool) -> None:
    """Report everything that is wrong with the config; exit 1 if anything is."""
    found: list[str]
    warnings: tuple[str, ...] = ()
    try:
        raw = read_toml(path)
        wanted = plugins_config(raw)
        plugins = Plugins.load(node=True, enable=wanted.enable, disable=wanted.disable)
        found = problems(raw, plugins)
        if not found:
            warnings = build(raw, plugins, node=True).warnings
        warnings += tuple(f"plugin {n} is left out: {e}" for n, e in plugins.broken.items())
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


@config.command()
@_FILE
@_JSON
def show(path: Path, as_json: bool) -> None:
    """Print every value in effect and where it is set."""
    site, plugins = _open(path)
    values = effective(site, plugins)
    if as_json:
        listed = {
            key: {"value": v.value, "unit": v.unit, "origin": v.origin} for key, v in values.items()
        }
        click.echo(json.dumps({"file": str(path), "values": listed}, indent=2))
        return
    lines = [(f"{key} = {v.text}", v.origin) for key, v in values.items()]
    width = min(60, max(len(line) for line, _ in lines))
    for line, origin in lines:
        click.echo(f"{line:{width}}  # {origin}")


@config.command("example")
def print_example() -> None:
    """Print a commented config with every key, its default, unit and meaning."""
    click.echo(example(Plugins.load(node=True)), nl=False)


def _open(path: Path) -> tuple[Site, Plugins]:
    try:
        raw = read_toml(path)
        wanted = plugins_config(raw)
        plugins = Plugins.load(node=True, enable=wanted.enable, disable=wanted.disable)
        return build(raw, plugins, node=True), plugins
    except VtorqueError as error:
        click.echo(f"vtorque: {error}", err=True)
        raise SystemExit(error.exit_code) from None
