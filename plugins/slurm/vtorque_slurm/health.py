"""Checks of Slurm on this node for ``vtorque doctor``."""

from __future__ import annotations

import os
from collections.abc import Iterator

from vtorque_core.api.health import HealthCheck, HealthResult, ok, warning
from vtorque_core.api.node_job import Site
from vtorque_core.live import service, spares
from vtorque_slurm import job_records
from vtorque_slurm.batch_commands import SlurmClient
from vtorque_slurm.controller_updates import this_node
from vtorque_slurm.settings import Settings
from vtorque_slurm.spank import installation


def checks() -> list[HealthCheck]:
    """Return the health checks for ``vtorque doctor`` on a node."""
    return [
        HealthCheck("slurm: memory of waiting guests", check_warm_memory),
        HealthCheck("slurm: SPANK plugin", installation.check),
    ]


def check_warm_memory(site: Site) -> Iterator[HealthResult]:
    """Check that Slurm does not allocate the memory of warm (pre-booted) guests to jobs.

    Yields nothing if there are no such guests or the caller is not root.
    """
    if os.geteuid() != 0:
        return
    held = sum(each.mib for each in spares.warm_guests(site.paths) if not each.job)
    if not held or service.batch_system(site.path)[1].name != "slurm":
        return
    client = SlurmClient(site[Settings])
    offered = job_records.offered_mib(client.ask("scontrol", "show", "node", this_node(client)))
    has = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20
    said = f"Slurm offers {offered} MiB of this node's {has} MiB, and warm guests use {held} MiB"
    if offered + held <= has:
        yield ok(said)
        return
    yield warning(
        f"{said}: Slurm may give their memory to jobs without guests",
        f"set MemSpecLimit={held} or more, or a smaller RealMemory, for this node in slurm.conf",
    )
