"""The plugin's declaration of ``vmgr experiment``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vtorque_core.api import Command, constant_hook

if TYPE_CHECKING:
    import click


def _experiment() -> click.Command:
    from vtorque_experiment.command import experiment  # noqa: PLC0415 - click

    return experiment


vtorque_commands = constant_hook(Command("vmgr experiment", _experiment))
