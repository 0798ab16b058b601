"""Register ``vmgr ps``, ``vmgr cancel`` and ``vtorque config explain``."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

from vtorque_core.api import Command, constant_hook

if TYPE_CHECKING:
    import click


def _commands() -> ModuleType:
    from vtorque_jobs import command  # noqa: PLC0415 - click

    return command


def _explain() -> click.Command:
    from vtorque_jobs.explain import explain  # noqa: PLC0415 - click

    return explain


vtorque_commands = constant_hook(
    Command("vmgr ps", lambda: _commands().ps),
    Command("vmgr cancel", lambda: _commands().cancel),
    Command("vtorque config explain", _explain),
)
