"""Click groups to which plugins add commands (``vtorque_commands``), and common options."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from vtorque_core.api import hooks
from vtorque_core.api.strategies import Command
from vtorque_core.base.distributions import how_to_install
from vtorque_core.base.errors import UsageError, VtorqueError
from vtorque_core.base.names import CONFIG_PATH
from vtorque_core.config.load import load
from vtorque_core.config.plugins import Plugins

_CONFIG, _BAD = "vtorque.config", "vtorque.config_error"  # in click's Context.meta
_Load = Callable[[], click.Command | None]
HELP = {"help_option_names": ["-h", "--help"]}
config_option = click.option(
    "--config",
    type=click.Path(readable=False, path_type=Path),
    default=CONFIG_PATH,
    is_eager=True,  # -h lists commands of the plugins that the config enables
    help=f"Use this site config instead of {CONFIG_PATH}.",
)
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")


class PluginGroup(click.Group):
    """A click group that imports a command of a plugin when the command is used.

    ``elsewhere``: commands by distribution, for the error message if the distribution is missing.
    ``always``: plugins to load even if the site config is unreadable or does not enable them.
    """

    def __init__(
        self, *args: Any, elsewhere: Mapping[str, str], always: Collection[str] = (), **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self._elsewhere = {
            word: name for name, words in elsewhere.items() for word in words.split()
        }
        self._always = always

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the group's own commands and of commands of plugins."""
        return sorted({*super().list_commands(ctx), *self._of_plugins(ctx)})

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command. ``--config`` in its arguments selects site config and plugins."""
        for word, following in pairwise([*args, ""]):
            if word == "--":  # other words belong to another program
                break
            option, _, joined = word.partition("=")
            if option == ("--file" if args[0] == "config" else "--config"):
                ctx.meta[_CONFIG] = Path(joined or following)
        return super().resolve_command(ctx, args)

    def _of_plugins(self, ctx: click.Context) -> Mapping[str, _Load]:
        given = ctx.meta.get(_CONFIG) or ctx.find_root().params.get("config") or CONFIG_PATH
        known = f"vtorque.commands {self.name} {given}"
        if known not in ctx.meta:
            try:
                _, enabled = load(given, node=False)
            except VtorqueError as error:
                ctx.meta[_BAD], enabled = error, Plugins()
            others = set(self._always) - set(enabled.names)
            there = ctx.meta[known] = {}
            for plugins in (enabled, *([Plugins.load(node=False, only=others)] if others else [])):
                for each in plugins.each(hooks.vtorque_commands):
                    if each.error is None and each.item.words.split()[-2] == self.name:
                        command = partial(_loaded, each.item, each.plugin, plugins, given)
                        there[each.item.words.split()[-1]] = cache(command)
        found: Mapping[str, _Load] = ctx.meta[known]
        return found

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command. Raises UsageError if its plugin is missing or disabled."""
        found = super().get_command(ctx, cmd_name)
        if found is None and (loaded := self._of_plugins(ctx).get(cmd_name)):
            found = loaded()
        _require_words(found)
        if found is None and _BAD in ctx.meta:  # the command may exist
            raise ctx.meta[_BAD]
        if found is None and cmd_name in self._elsewhere:
            distribution = self._elsewhere[cmd_name]
            raise UsageError(
                f"{ctx.command_path} {cmd_name} is a command of {distribution}, which "
                f"is not installed or is disabled: {how_to_install(distribution)}"
            )
        return found


def _loaded(item: Command, plugin: str, plugins: Plugins, config: Path) -> click.Command | None:
    try:
        command = item.import_command()
        if command.name != item.words.split()[-1]:  # other hosts find it by its name
            raise ValueError(f"{item.words!r} must end with the command's name {command.name!r}")
        if item.of_job is not None:
            found = plugins.collect(
                hooks.vtorque_remote_command, command=command, of_job=item.of_job, config=config
            )
            command = found[-1].item if found else command
    except Exception as error:  # third-party code
        click.echo(f"a command of plugin {plugin} is disabled: {error}", err=True)
        return None
    return command


def _require_words(command: click.Command | None) -> None:
    """Make a command refuse empty arguments, such as an unset ``"$JOB"``."""
    for each in command.commands.values() if isinstance(command, click.Group) else ():
        _require_words(each)
    for param in command.params if command else ():
        if isinstance(param, click.Argument) and (param.nargs == 1 or param.required):
            param.callback = _word


def _word(ctx: click.Context, param: click.Parameter, value: Any) -> Any:
    given = ctx.get_parameter_source(param.name or "") is ParameterSource.COMMANDLINE
    if given and "" in (value if isinstance(value, tuple) else (value,)):
        name = param.human_readable_name.strip("[.]")
        raise UsageError(f"{ctx.command_path}: the argument {name} is empty")
    return value
