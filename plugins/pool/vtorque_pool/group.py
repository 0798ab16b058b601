"""The command group ``vtorque pool``."""

from __future__ import annotations

from pathlib import Path

import click

from vtorque_core.api import deferred
from vtorque_core.live.command_groups import LazyGroup

CONFIG = click.option(
    "--config", type=click.Path(readable=False, path_type=Path), help="Other config file."
)
_show_nodes = deferred("vtorque_pool.command:show_nodes")


@click.group(
    cls=LazyGroup,
    module="vtorque_pool.command",
    words="config destroy drain hold release serve setup simulate tidy",
    invoke_without_command=True,
    short_help="Create and delete worker nodes on demand.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--metrics", is_flag=True, help="Print metrics for Prometheus.")
@CONFIG
@click.pass_context
def pool(context: click.Context, as_json: bool, metrics: bool, config: Path | None) -> None:
    """List nodes: state, age, idle time, cost per hour, jobs. As root or Slurm's user."""
    if context.invoked_subcommand is None:
        _show_nodes(config, as_json, metrics)
    context.obj = config
