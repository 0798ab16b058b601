"""The command group ``vmgr experiment``."""

from __future__ import annotations

import click

from vtorque_core.live.command_groups import LazyGroup


@click.group(
    cls=LazyGroup,
    module="vtorque_experiment.command",
    words="compare export results resume run status",
    short_help="Run a script with many values, and compare the numbers.",
)
def experiment() -> None:
    """Run job scripts with many values, record numbers of each job, and compare them.

    A TOML file names job scripts, a matrix of values, repetitions, and the numbers to extract from
    each job: see doc/experiment.md.

    Exit codes: 0 done, 1 failed, 2 wrong usage or refused, 3 a condition of --fail-if is true, 4
    done with failed points, 5 stopped before the end.
    """
