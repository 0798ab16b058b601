"""The batch system ``slurm``: what it declares. Nothing here costs a submission anything."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vtorque_core.api import BatchSystem, hookimpl, setting

if TYPE_CHECKING:
    from vtorque_core.api_batch import JobShell, NodeAdapter, Submitter
    from vtorque_core.api_node import Site


@dataclass(frozen=True)
class Settings:
    """``[plugin.slurm]``."""

    feature: str = setting("", doc="node feature that VM jobs ask for; empty: none")
    command: str = setting("sbatch", doc="whose arguments vsub takes: sbatch, or Slurm's own qsub")
    bindir: str = setting("", doc="directory of sbatch, scontrol, ...; empty: the PATH")
    conf: str = setting("/etc/slurm/slurm.conf", doc="slurm.conf of this host")
    options: tuple[str, ...] = setting(
        (), doc="sbatch options of the site's SPANK plugins; with = at the end: takes a value"
    )
    requeue_limit: int = setting(
        2, doc="how often a job is requeued because a node failed it; then it is held"
    )
    cpu_ids: bool = setting(
        True,
        doc="guests stay on the job's CPUs; false: where Slurm binds nothing",
    )
    prolog_time: float = setting(
        420.0,
        doc="the least PrologEpilogTimeout and BatchStartTimeout that setup install accepts: "
        "[node] start_timeout, teardown_timeout, and a minute",
        unit="s",
    )
    timeout: float = setting(20.0, doc="one question to Slurm's controller", unit="s")


def submitter(site: Site) -> Submitter:
    """Return the submitting half."""
    from vtorque_slurm.submitter import SlurmSubmitter  # noqa: PLC0415

    sbatch = SlurmSubmitter(site[Settings], site.paths.jobshell)
    if site[Settings].command == "sbatch":
        return sbatch
    from vtorque_slurm.qsub import QsubSubmitter, is_inner  # noqa: PLC0415

    return sbatch if is_inner() else QsubSubmitter(sbatch)


def node(site: Site) -> NodeAdapter:
    """Return the node half."""
    from vtorque_slurm.node import SlurmNode  # noqa: PLC0415

    return SlurmNode(site[Settings], site.paths.journal, site.paths.proof("0").parent)


def shell() -> JobShell:
    """Return the job part."""
    from vtorque_slurm.shell import SlurmJobShell  # noqa: PLC0415

    return SlurmJobShell()


@hookimpl
def vtorque_settings() -> Iterator[type[Settings]]:
    """Declare ``[plugin.slurm]``."""
    yield Settings


@hookimpl
def vtorque_batch_systems() -> Iterator[BatchSystem]:
    """Bring ``slurm``."""
    yield BatchSystem("slurm", submitter=submitter, node=node, shell=shell)
