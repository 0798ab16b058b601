"""``vtorque plugins``: what is installed, what is on, what is broken."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from vtorque_core.plugins import Plugins, distribution_of, installed


@dataclass(frozen=True)
class Row:
    """One plugin as the command shows it."""

    name: str
    distribution: str
    state: str
    hooks: tuple[str, ...]
    error: str = ""


@click.command()
@click.option("--config", type=click.Path(path_type=Path), default=None, help="Other config file.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def plugins(config: Path | None, as_json: bool) -> None:
    """List plugins: distribution, enabled or not, hooks, import errors.

    Exit code 1 if an enabled plugin is broken.
    """
    from vtorque_core.config import CONFIG_PATH, plugins_config, read_toml  # noqa: PLC0415

    wanted = plugins_config(read_toml(config or CONFIG_PATH))
    loaded = Plugins.load(node=True, enable=wanted.enable, disable=wanted.disable)
    rows = list_rows(loaded)
    if as_json:
        sys.stdout.write(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
    else:
        _print(rows)
    sys.exit(1 if any(row.state == "broken" for row in rows) else 0)


def list_rows(loaded: Plugins) -> list[Row]:
    """Return one row per installed plugin, in the order hooks are called."""
    loaded.options(), loaded.guest_types(), loaded.batch_systems(), loaded.image_builders()
    rows = [Row("core", "vtorque-core", "enabled", loaded.hooks_of("core"))]
    for name, points in installed().items():
        error = loaded.broken.get(name, "")
        state = "broken" if error else "enabled" if name in loaded.names else "disabled"
        hooks = loaded.hooks_of(name) if state == "enabled" else ()
        rows.append(Row(name, distribution_of(points[0]), state, hooks, error))
    return rows


def _print(rows: list[Row]) -> None:
    width = max(len(row.name) for row in rows)
    for row in rows:
        sys.stdout.write(f"{row.name:{width}}  {row.state:8}  {row.distribution}\n")
        for hook in row.hooks:
            sys.stdout.write(f"{'':{width}}    {hook}\n")
        if row.error:
            sys.stdout.write(f"{'':{width}}    {row.error}\n")
