"""Register the batch system ``slurm``. Imports are deferred to keep submission fast."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from vtorque_core.api import BatchSystem, constant_hook, hookimpl
from vtorque_slurm.settings import Settings

if TYPE_CHECKING:
    from vtorque_core.api.batch_system import JobShell, NodeAdapter, Submitter
    from vtorque_core.api.health import HealthCheck
    from vtorque_core.api.node_job import Site
    from vtorque_core.api.strategies import StepOf


def submitter(site: Site) -> Submitter:
    """Return the submitter."""
    from vtorque_slurm.submitter import SlurmSubmitter  # noqa: PLC0415

    sbatch = SlurmSubmitter(site[Settings], site.paths.jobshell)
    if site[Settings].command == "sbatch":
        return sbatch
    from vtorque_slurm.qsub import QsubSubmitter, is_inner  # noqa: PLC0415

    return sbatch if is_inner() else QsubSubmitter(sbatch)


def node(site: Site) -> NodeAdapter:
    """Return the node adapter."""
    from vtorque_slurm.node import SlurmNode  # noqa: PLC0415

    return SlurmNode(site[Settings], site.paths.journal, site.paths.proof("0").parent)


def shell() -> JobShell:
    """Return the job shell adapter."""
    from vtorque_slurm.shell import SlurmJobShell  # noqa: PLC0415

    return SlurmJobShell()


def step(site: Site) -> StepOf:
    """Return the function that runs a command on a job's node with srun."""
    from vtorque_slurm.submitter import SlurmSubmitter  # noqa: PLC0415

    return SlurmSubmitter(site[Settings], site.paths.jobshell).step


@hookimpl
def vtorque_health_checks() -> Iterable[HealthCheck]:
    """Return the health checks for ``vtorque doctor`` on a node."""
    from vtorque_core.api.health import HealthCheck  # noqa: PLC0415
    from vtorque_slurm.health import memory_apart  # noqa: PLC0415
    from vtorque_slurm.spank import installed  # noqa: PLC0415

    return [
        HealthCheck("slurm: memory of waiting guests", memory_apart),
        HealthCheck("slurm: SPANK plugin", installed.check),
    ]


vtorque_settings = constant_hook(Settings)
vtorque_batch_systems = constant_hook(
    BatchSystem(
        "slurm",
        submitter,
        node,
        shell,
        frozenset({"partition", "account", "qos"}),
        step,
        knows_all_nodes=True,
    )
)
