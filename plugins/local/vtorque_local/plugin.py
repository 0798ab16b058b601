"""Register ``local``, a batch system for one machine, and ``vtorque local``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vtorque_core.api import BatchSystem, Command, constant_hook
from vtorque_core.api.values import is_personal
from vtorque_local.settings import Settings

if TYPE_CHECKING:
    import click

    from vtorque_core.api.batch_system import JobShell, NodeAdapter, Submitter
    from vtorque_core.api.node_job import Site
    from vtorque_core.api.strategies import StepOf


def submitter(site: Site) -> Submitter:
    """Return the submitter."""
    from vtorque_local.submitter import LocalSubmitter, serving  # noqa: PLC0415

    return LocalSubmitter(site.paths, serving(site.path) if is_personal(site) else ())


def node(site: Site) -> NodeAdapter:
    """Return the node adapter."""
    from vtorque_local.node import LocalNode  # noqa: PLC0415

    return LocalNode(site.paths.state / "local")


def shell() -> JobShell:
    """Return the job shell adapter, which is Torque's."""
    from vtorque_pbs.shell import PbsJobShell  # noqa: PLC0415

    return PbsJobShell()


def step(_: Site) -> StepOf:
    """Return the function that runs a command on a job's node. Here it is the command itself."""
    return lambda job_id, node, argv, terminal: list(argv)


def command() -> click.Command:
    """Return ``vtorque local``."""
    from vtorque_local.command import local  # noqa: PLC0415 - click

    return local


vtorque_settings = constant_hook(Settings)
vtorque_batch_systems = constant_hook(
    BatchSystem("local", submitter=submitter, node=node, shell=shell, step=step)
)
vtorque_commands = constant_hook(Command("vtorque local", command))
