"""``[plugin.slurm]``: site settings for Slurm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from vtorque_core.api import setting


@dataclass(frozen=True)
class Settings:
    """Settings in ``[plugin.slurm]``."""

    feature: str = setting("", doc="node feature that VM jobs request; empty: none")
    command: str = setting(
        "sbatch", doc="submit command whose arguments vsub accepts: sbatch, or Slurm's own qsub"
    )
    bindir: str = setting("", doc="directory of sbatch, scontrol, ...; empty: search PATH")
    conf: str = setting("/etc/slurm/slurm.conf", doc="slurm.conf of this host")
    options: tuple[str, ...] = setting(
        (),
        doc="sbatch options of the site's SPANK plugins; with = at the end: the option "
        "takes a value",
    )
    spank: bool = setting(
        False, doc="users may submit VM jobs with --vm= of sbatch, srun and salloc"
    )
    requeue: bool = setting(
        False, doc="jobs may requeue themselves with scontrol requeue in their first guest"
    )
    exclusive: Literal["", "user", "node"] = setting(
        "",
        doc="VM jobs request nodes without jobs of other users (user) or without other jobs (node)",
    )
    requeue_limit: int = setting(
        2, doc="how often a job is requeued after a node failure before it is held"
    )
    cpu_ids: bool = setting(
        True,
        doc="guests run on the job's CPUs; false: for sites where Slurm does not bind "
        "tasks to CPUs",
    )
    prolog_time: float = setting(
        420.0,
        doc="minimum of PrologEpilogTimeout and BatchStartTimeout that setup install "
        "accepts: [node] start_timeout plus teardown_timeout plus 60 s",
        unit="s",
    )
    timeout: float = setting(20.0, doc="time limit of one query of Slurm's controller", unit="s")
