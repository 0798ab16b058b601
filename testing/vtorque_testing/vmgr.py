"""``vmgr`` as its users have it, in this process: where a plugin's commands are found and run."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner, Result

from vtorque_core.cli.vmgr import vmgr


def run(config: Path, *argv: object) -> Result:
    """Return what a command did with that site config: exit code, output, and what it raised."""
    return CliRunner().invoke(vmgr, ["--config", str(config), *map(str, argv)])
