"""Click groups that import a command's module when the command is used."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from vtorque_core.api import hooks
from vtorque_core.base.distributions import how_to_install
from vtorque_core.base.errors import UsageError, VtorqueError
from vtorque_core.base.names import CONFIG_PATH
from vtorque_core.cli.entry import telling

if TYPE_CHECKING:
    from vtorque_core.api.strategies import Command
    from vtorque_core.site.plugins import Plugins

_CONFIG, _BAD = "vtorque.config", "vtorque.config_error"  # in click's Context.meta
HELP = {"help_option_names": ["-h", "--help"]}
config_option = click.option(
    "--config",
    type=click.Path(readable=False, path_type=Path),
    default=CONFIG_PATH,
    is_eager=True,  # -h lists commands of the plugins that the config enables
    help=f"Use this site config instead of {CONFIG_PATH}.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


class LazyGroup(click.Group):
    """Group of lazily imported commands (``module:name``) and of plugins' commands.

    ``elsewhere`` maps commands of plugins that may be missing to their distributions.
    """

    def __init__(
        self,
        *args: Any,
        lazy: Iterable[str],
        elsewhere: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._lazy = {target.partition(":")[2]: target for target in lazy}
        self._elsewhere = dict(elsewhere or {})

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*self._lazy, *super().list_commands(ctx), *self._of_plugins(ctx)})

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command, with the plugins of the site config that its own options may name."""
        for word, following in pairwise([*args, ""]):
            if word == "--":  # other words belong to another program
                break
            option, _, joined = word.partition("=")
            if option == ("--file" if args[0] == "config" else "--config"):
                ctx.meta[_CONFIG] = Path(joined or following)
        return super().resolve_command(ctx, args)

    def _of_plugins(self, ctx: click.Context) -> Mapping[str, _Brought]:
        from vtorque_core.site.load import opened  # noqa: PLC0415

        given = ctx.meta.get(_CONFIG) or ctx.find_root().params.get("config") or CONFIG_PATH
        known = f"vtorque.commands {self.name} {given}"
        if known not in ctx.meta:
            try:
                _, plugins = opened(given, node=False, new=True)
            except VtorqueError as error:
                ctx.meta[_BAD] = error
                return {}
            there = ctx.meta[known] = {}
            for each in plugins.each(hooks.vtorque_commands):
                if each.error is None and each.item.words.split()[-2] == self.name:
                    brought = _Brought(plugins, given, each.plugin, each.item)
                    there[each.item.words.split()[-1]] = brought
        found: Mapping[str, _Brought] = ctx.meta[known]
        return found

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._lazy:
            found = super().get_command(ctx, cmd_name)
            if found is None and (brought := self._of_plugins(ctx).get(cmd_name)):
                found = brought.command
            if found is None and _BAD in ctx.meta:  # the command may exist
                raise ctx.meta[_BAD]
            if found is None and cmd_name in self._elsewhere:
                brings = self._elsewhere[cmd_name]
                raise UsageError(
                    f"{ctx.command_path} {cmd_name} is a command of {brings}, which "
                    f"is not installed or is disabled: {how_to_install(brings)}"
                )
            return found
        module, _, name = self._lazy[cmd_name].partition(":")
        command: click.Command = getattr(importlib.import_module(module), name)
        return command


@dataclass(frozen=True)
class _Brought:
    plugins: Plugins
    config: Path
    plugin: str
    item: Command

    @cached_property
    def command(self) -> click.Command | None:
        try:
            command = self.item.load()
            if command.name != self.item.words.split()[-1]:  # other hosts find it by its name
                raise ValueError(f"{self.item.words} loads the command {command.name}")
            if self.item.of_job is not None:
                found = self.plugins.collect(
                    hooks.vtorque_elsewhere,
                    command=command,
                    of_job=self.item.of_job,
                    config=self.config,
                )
                command = found[-1].item if found else command
        except Exception as error:  # third-party code
            click.echo(f"a command of plugin {self.plugin} is disabled: {error}", err=True)
            return None
        return command


def run(command: click.Command, program: str) -> NoReturn:
    # https://no-color.org; click only checks for a terminal.
    color = False if os.environ.get("NO_COLOR") else None
    with telling(program):
        try:
            result = command.main(prog_name=program, standalone_mode=False, color=color)
        except click.ClickException as error:
            error.show()
            sys.exit(error.exit_code)
        except click.Abort:
            raise KeyboardInterrupt from None
        sys.exit(result if isinstance(result, int) else 0)
