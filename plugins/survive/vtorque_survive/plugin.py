"""What the plugin declares: ``vmgr suspend``, ``vmgr resume``, ``[plugin.survive]``."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import TYPE_CHECKING

from vtorque_core.api import Command, JobRequest, OfJob, Option, Refusal, always, hookimpl
from vtorque_survive.settings import Settings
from vtorque_survive.words import BEFORE, checkpoint_id, interval, when

if TYPE_CHECKING:
    import click

    from vtorque_core.api.node_job import Site


def _commands() -> ModuleType:
    from vtorque_survive import command  # noqa: PLC0415 - click

    return command


def _suspend() -> click.Command:
    found: click.Command = _commands().suspend
    return found


def _resume() -> click.Command:
    found: click.Command = _commands().resume
    return found


def _checkpoint() -> click.Command:
    found: click.Command = _commands().checkpoint
    return found


def _checkpoints() -> click.Command:
    from vtorque_survive.checkpoints_command import checkpoints  # noqa: PLC0415 - click

    return checkpoints


@hookimpl
def vtorque_parse_args(request: JobRequest, site: Site) -> Iterator[Refusal]:
    """Refuse what this site does not do."""
    wanted, settings = request[CHECKPOINT], site[Settings]
    if wanted and not settings.checkpoints:
        where = "[plugin.survive] checkpoints"
        yield Refusal("this site has no place for checkpoints", CHECKPOINT.key, wanted, where=where)
    elif wanted and wanted != BEFORE and interval(wanted) < settings.least:
        limit = f"jobs are saved every {settings.least:g} s at most"
        yield Refusal(limit, CHECKPOINT.key, wanted, where="[plugin.survive] least")


CHECKPOINT = Option(
    "checkpoint", when, "", "have the job be saved: every:1h, or before-walltime", "WHEN"
)
RESUME = Option("resume", checkpoint_id, "", "go on with a checkpoint, in place of a boot", "ID")
_OF_JOB = OfJob(("this_node",))

vtorque_settings = always(Settings)
vtorque_options = always(RESUME, CHECKPOINT)
vtorque_commands = always(
    Command("vmgr", _suspend, _OF_JOB),
    Command("vmgr", _resume, _OF_JOB),
    Command("vmgr", _checkpoint, OfJob(("stop", "this_node"))),
    Command("vmgr", _checkpoints),
)
