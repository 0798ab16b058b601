"""A click group that imports a command's module when the command is used, not before."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from typing import Any, NoReturn

import click

from vtorque_core.errors import EXIT_USAGE, VtorqueError

HELP = {"help_option_names": ["-h", "--help"]}


class LazyGroup(click.Group):
    """``commands`` given as name to ``(module:attribute, one-line help)``."""

    def __init__(self, *args: Any, lazy: Mapping[str, tuple[str, str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lazy = dict(lazy)

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return all command names, sorted."""
        return sorted({*self._lazy, *super().list_commands(ctx), *self._of_plugins()})

    def _of_plugins(self) -> dict[str, click.Command]:
        """Return the commands that enabled plugins add to this program; none if config is bad."""
        from vtorque_core.cli.site import load_for_user  # noqa: PLC0415

        try:
            _, plugins = load_for_user()
        except VtorqueError:
            return {}
        found = [c.item for c in plugins.each("vtorque_commands") if c.error is None]
        commands = [each.load() for each in found if each.program == self.name]
        return {command.name or "": command for command in commands}

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command, importing its module."""
        if cmd_name not in self._lazy:
            return super().get_command(ctx, cmd_name) or self._of_plugins().get(cmd_name)
        module, _, attribute = self._lazy[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands with their one-line help, importing nothing."""
        rows = [(name, text) for name, (_, text) in self._lazy.items() if text]
        rows += [(name, c.get_short_help_str()) for name, c in self._of_plugins().items()]
        with formatter.section("Commands"):
            formatter.write_dl(sorted(rows))


def run(command: click.Command, program: str) -> NoReturn:
    """Run a click command; end with one line and vTorque's exit code on any error of ours."""
    try:
        # https://no-color.org; click itself only looks whether there is a terminal.
        color = False if os.environ.get("NO_COLOR") else None
        result = command.main(prog_name=program, standalone_mode=False, color=color)
    except click.exceptions.NoArgsIsHelpError as error:
        sys.stdout.write(error.format_message() + "\n")
        sys.exit(EXIT_USAGE)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.Abort:
        sys.stderr.write(f"{program}: interrupted\n")
        sys.exit(130)
    except VtorqueError as error:
        sys.stderr.write(f"{program}: {error}\n")
        sys.exit(error.exit_code)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(141)
    sys.exit(result if isinstance(result, int) else 0)
