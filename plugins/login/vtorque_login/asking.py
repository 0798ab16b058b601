"""Wrap commands about a job so that they run on the job's node."""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from vtorque_core.api import Remote, UsageError

_OPTIONS = (
    click.Option(
        ["--node"],
        default="",
        metavar="NODE",
        help="Run the command on this node instead of the job's first.",
    ),
    # Set for a request from another host: only permitted parameters, and no further hop.
    click.Option(["--here"], is_flag=True, hidden=True),
)


def wrap_command(command: click.Command, of_job: Remote, config: Path) -> click.Command:
    """Return a copy of a command about a job; the copy runs the command on the job's node.

    ``of_job`` says which parameters the copy may send to the node, and whether the command uses a
    terminal or an output file.
    """
    there = command.callback
    assert there is not None  # noqa: S101 - only click's groups have no callback

    def callback(job_id: str, node: str, here: bool, **values: Any) -> Any:
        from vtorque_login.remote_command import RemoteCommand, run  # noqa: PLC0415 - rarely needed

        options, operands = _given_words(click.get_current_context(), values)
        output = values[of_job.output] if of_job.output in options else None
        if here:
            _check_parameters({*options, *operands}, of_job, output)
        else:
            if output is not None:
                options[of_job.output] = [options[of_job.output][0].partition("=")[0] + "=-"]
            trailing = any(p.nargs == -1 and p.name in operands for p in command.params)
            terminal = of_job.terminal and not trailing and os.isatty(0) and os.isatty(1)
            name = command.name or ""
            asked = RemoteCommand(
                name, job_id, node, options, operands, terminal, output, of_job.terminal
            )
            code = run(asked, config)
            if code is not None:
                sys.exit(code)
        return there(job_id=job_id, **values)

    wrapped = copy.copy(command)
    wrapped.callback, wrapped.params = callback, [*command.params, *_OPTIONS]
    return wrapped


def _check_parameters(given: set[str], of_job: Remote, output: object) -> None:
    allowed = {*of_job.travels, of_job.output} if str(output) == "-" else set(of_job.travels)
    if other := given - allowed:
        raise UsageError(f"{', '.join(sorted(other))}: only supported on the job's node")


_Words = dict[str, Sequence[str]]


def _given_words(context: click.Context, values: Mapping[str, Any]) -> tuple[_Words, _Words]:
    """Return the options and operands of the command line, by parameter name.

    Each option is a list of words, as in ``{"level": ["--level=info"]}``.
    """
    options: _Words = {}
    operands: _Words = {}
    written = click.core.ParameterSource.COMMANDLINE
    for param in context.command.params:
        name = param.name or ""
        if name not in values or context.get_parameter_source(name) is not written:
            continue
        value = values[name]
        many = list(value) if isinstance(value, tuple) else [value]
        if isinstance(param, click.Option):
            option = max(param.opts, key=len)
            options[name] = [option if param.is_flag else f"{option}={each}" for each in many]
        else:
            operands[name] = [str(each) for each in many]
    return options, operands
