"""Register ``local``, a batch system for one machine, and ``vtorque local``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vtorque_core.api import BatchSystem, Command, constant_hook, deferred
from vtorque_local.settings import Settings

if TYPE_CHECKING:
    from vtorque_core.api.node_job import Site
    from vtorque_core.api.strategies import StepOf


def step(_: Site) -> StepOf:
    """Return the function that changes a command so that it runs on a job's node.

    It returns the command unchanged, because this machine is the node of all jobs.
    """
    return lambda job_id, node, argv, terminal: list(argv)


vtorque_settings = constant_hook(Settings)
vtorque_batch_systems = constant_hook(
    BatchSystem(
        "local",
        submitter=deferred("vtorque_local.submitter:create_submitter"),
        node=deferred("vtorque_local.node:create_node"),
        shell=deferred("vtorque_pbs.shell:PbsJobShell"),
        step=step,
    )
)
vtorque_commands = constant_hook(Command("vtorque local", "vtorque_local.command:local"))
