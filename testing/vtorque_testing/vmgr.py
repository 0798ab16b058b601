"""Run ``vmgr`` commands in this process, including commands of plugins."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner, Result

from vtorque_core.cli.vmgr import vmgr


def run(config: Path, *argv: object) -> Result:
    """Run a command with this site config; return its exit status, output and exception."""
    return CliRunner().invoke(vmgr, ["--config", str(config), *map(str, argv)])
