"""``vtorque plugins``: list plugins with their state and contributions."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import click

from vtorque_admin import author_errors
from vtorque_core.api import EXIT_FAILED, Command, ConfigError, hooks
from vtorque_core.api.tables import show
from vtorque_core.live.command_groups import PluginGroup, config_option, json_option
from vtorque_core.live.site_config import (
    BUILTIN,
    Plugins,
    Raw,
    build,
    installed_plugins,
    open_config,
    owner,
    plugins_config,
)


def _point_name(item: Command) -> str:
    item.import_command()
    return item.words


# Kind of contribution (as in the table and --json), its hook, and a function for an item's name.
_KINDS: tuple[tuple[str, Callable[[], Iterable[Any]], Callable[[Any], str]], ...] = (
    ("-vm", hooks.vtorque_options, lambda item: str(item.key)),
    ("guest types", hooks.vtorque_guest_types, lambda item: str(item.name)),
    ("batch systems", hooks.vtorque_batch_systems, lambda item: str(item.name)),
    ("image builders", hooks.vtorque_image_builders, lambda item: str(item.name)),
    ("commands", hooks.vtorque_commands, _point_name),
)


@dataclass(frozen=True)
class Row:
    """One plugin in the list.

    Attributes:
        why: reason why the plugin is disabled, broken or slow.
        brings: names of its contributions by kind.
        wrong: programming errors in an enabled plugin.
    """

    name: str
    state: str
    distribution: str
    version: str
    why: str = ""
    brings: dict[str, list[str]] = field(default_factory=dict)
    hooks: tuple[str, ...] = ()
    wrong: tuple[str, ...] = ()


@click.group(
    cls=PluginGroup,
    elsewhere={"vtorque-testing": "new"},
    invoke_without_command=True,
    short_help="List plugins: state, version, what each provides.",
)
@config_option
@click.option("-v", "--verbose", is_flag=True, help="Also list the hooks of each plugin.")
@json_option
@click.pass_context
def plugins(ctx: click.Context, config: Path, verbose: bool, as_json: bool) -> None:
    """List plugins: state, version, contributions, and why a plugin is disabled or broken.

    Exit code 1 if a plugin is broken or has programming errors, or if the config is invalid.
    """
    if ctx.invoked_subcommand:
        return

    raw, loaded = open_config(config, node=True)
    wrong = ""
    try:
        build(raw, loaded, node=True)
    except ConfigError as error:
        wrong = str(error)
    rows = list_rows(loaded, raw, plugins_config(raw).disable)
    if as_json:
        click.echo(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        _print(rows, verbose)
    if wrong:
        click.echo(f"vtorque: {wrong}", err=True)
    bad = wrong or any(row.state == "broken" or row.wrong for row in rows)
    sys.exit(EXIT_FAILED if bad else 0)


def list_rows(loaded: Plugins, raw: Raw, disabled: tuple[str, ...]) -> list[Row]:
    """Return a row for each installed plugin, the core first."""
    brought = _contributions(loaded)
    points = {name: owner(found[0]) for name, found in installed_plugins().items()}
    rows = []
    for name, whose in (
        {BUILTIN: f"vtorque-core {metadata.version('vtorque-core')}"} | points
    ).items():
        distribution, _, version = whose.rpartition(" ")
        if why := loaded.broken.get(name, ""):
            rows.append(Row(name, "broken", distribution, version, why))
        elif name in loaded.off:
            key = "disable" if name in disabled else "enable"
            why = f"[plugins] {key} ({raw.origin(f'plugins.{key}')})"
            rows.append(Row(name, "off", distribution, version, why))
        else:
            has, its = brought.get(name, {}), loaded.hooks_of(name)
            wrong = tuple(author_errors.find_errors(loaded, name))
            slow = author_errors.slow_import(loaded, name)
            rows.append(Row(name, "on", distribution, version, slow, has, its, wrong))
    return rows


def _contributions(loaded: Plugins) -> dict[str, dict[str, list[str]]]:
    loaded.options(), loaded.guest_types(), loaded.batch_systems(), loaded.image_builders()
    found: dict[str, dict[str, list[str]]] = {}
    for kind, hook, name_of in _KINDS:
        for each in loaded.each(hook):
            try:
                if each.error is not None:
                    raise each.error
                found.setdefault(each.plugin, {}).setdefault(kind, []).append(name_of(each.item))
            except (Exception, SystemExit) as error:
                name = hook.__name__
                told = f"{name}: {type(error).__name__}: {error}"
                told = each.message(name) if each.error else told
                loaded.broken.setdefault(each.plugin, told)
    for names in [names for has in found.values() for names in has.values()]:
        names.sort()
    return found


def _print(rows: list[Row], verbose: bool) -> None:
    columns = ["NAME", "STATE", "VERSION", "BRINGS"] + (["HOOKS"] if verbose else [])
    cells = []
    for row in rows:
        brings = "; ".join(f"{kind} {', '.join(names)}" for kind, names in row.brings.items())
        shown = [", ".join(hook.removeprefix("vtorque_") for hook in row.hooks) or "-"]
        cells.append([row.name, row.state, row.version, brings or "-", *(shown if verbose else [])])
    notes = [f"{row.name} is {row.state}: {row.why}" for row in rows if row.why]
    notes += [
        f"{row.name} ({row.distribution} {row.version}): {w}" for row in rows for w in row.wrong
    ]
    show(columns, cells, notes)
