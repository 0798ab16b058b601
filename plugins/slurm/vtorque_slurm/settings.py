"""``[plugin.slurm]``: what a site says about its Slurm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vtorque_core.api import setting


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
    exclusive: Literal["", "user", "node"] = setting(
        "", doc="VM jobs ask for nodes without other users' jobs, or alone (--exclusive)"
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
