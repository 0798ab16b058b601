"""The entry points that the batch system's root hooks, and its job shell, call. Hidden."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import click

from vtorque_core.cli.entry import become_clean
from vtorque_core.errors import EXIT_NO_PROOF, HostFault, VtorqueError

_PASS = {"ignore_unknown_options": True, "allow_interspersed_args": False}


@dataclass(frozen=True)
class _Call:
    """What the batch system has called a hook with."""

    config: Path
    environ: Mapping[str, str]


@click.group(hidden=True)
@click.option("--config", type=click.Path(path_type=Path), default=None)
@click.pass_context
def hook(ctx: click.Context, config: Path | None) -> None:
    """Run as root by the batch system."""
    from vtorque_core.config import CONFIG_PATH  # noqa: PLC0415

    ctx.obj = _Call(config or CONFIG_PATH, dict(os.environ))
    become_clean()  # what a plugin needs is in its arguments


@hook.command(context_settings=_PASS)
@click.argument("argv", nargs=-1, type=click.UNPROCESSED)
@click.pass_obj
def prologue(call: _Call, argv: tuple[str, ...]) -> None:
    """Start the job's guests. ARGV is what the batch system gives its prologue."""
    from vtorque_core import prologue as module  # noqa: PLC0415
    from vtorque_core.cli.site import load_for_root  # noqa: PLC0415
    from vtorque_core.setup import runtime_directories  # noqa: PLC0415

    site, plugins = load_for_root(call.config)
    adapter = plugins.batch_system(site.batch.system).node(site)
    runtime_directories(site)
    sys.exit(module.run(adapter, site, plugins, argv, call.environ))


@hook.command(context_settings=_PASS)
@click.argument("argv", nargs=-1, type=click.UNPROCESSED)
@click.pass_obj
def epilogue(call: _Call, argv: tuple[str, ...]) -> None:
    """Release everything the job's journals name. ARGV begins with the job id.

    Its tenth word, if it has one, is the job's exit status, as with Torque.
    """
    from vtorque_core import epilogue as module  # noqa: PLC0415

    if not argv:
        raise HostFault("the batch system gave no job id", stage="epilogue")
    sys.exit(module.run(call.config, argv[0], argv[9] if len(argv) > 9 else ""))


@click.command(hidden=True, context_settings=_PASS)
@click.option("--config", type=click.Path(path_type=Path), default=None)
@click.argument("argv", nargs=-1, type=click.UNPROCESSED)
def jobshell(config: Path | None, argv: tuple[str, ...]) -> None:
    """Run a job script inside its guest, as the job's user, instead of a shell.

    ARGV is what the batch system gives its job's shell; or "--await-job JOB", to wait for this
    node's guests only.
    """
    from vtorque_core import after_script  # noqa: PLC0415
    from vtorque_core.cli.site import load  # noqa: PLC0415
    from vtorque_core.config import CONFIG_PATH  # noqa: PLC0415
    from vtorque_core.wrapper import AWAIT, await_here, run_job  # noqa: PLC0415

    try:
        site, plugins = load(config or CONFIG_PATH, node=False)
        if argv[:1] == (AWAIT,) and len(argv) == 2:
            code = await_here(site.paths, argv[1])
        else:
            code = run_job(
                site.paths,
                plugins.batch_system(site.batch.system).shell(),
                argv,
                after=lambda proof, code: after_script.run(proof, code, site, plugins),
            )
    except VtorqueError as error:
        sys.stderr.write(f"vtorque: {error}\n")
        code = EXIT_NO_PROOF
    sys.exit(code)
