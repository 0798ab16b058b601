"""Register the batch system ``slurm``. Imports are deferred to keep submission fast."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from vtorque_core.api import BatchSystem, constant_hook, deferred, hookimpl
from vtorque_slurm.settings import Settings

if TYPE_CHECKING:
    from vtorque_core.api import JobAttempt
    from vtorque_core.api.node_job import Site

REQUEUE_SOCKET = "requeue.sock"
"""Host end of the port in a guest's run directory; see :mod:`vtorque_slurm.requeue_port`."""

vtorque_settings = constant_hook(Settings)
vtorque_batch_systems = constant_hook(
    BatchSystem(
        "slurm",
        submitter=deferred("vtorque_slurm.submitter:create_submitter"),
        node=deferred("vtorque_slurm.node:create_node"),
        shell=deferred("vtorque_slurm.shell:SlurmJobShell"),
        facts=frozenset({"partition", "account", "qos"}),
        step=deferred("vtorque_slurm.submitter:step"),
        knows_all_nodes=True,
    )
)
vtorque_health_checks = hookimpl(deferred("vtorque_slurm.health:checks"))


@hookimpl
def vtorque_beside_script(
    job: JobAttempt, batch: BatchSystem, site: Site
) -> Iterator[Sequence[str]]:
    """Yield the command that requeues the job when its script requests this."""
    settings = site[Settings]
    if settings.requeue and batch.name == "slurm":
        port = site.paths.job_run(job.key) / "g0" / REQUEUE_SOCKET
        words = [str(port), job.id, settings.bindir, settings.conf, str(settings.timeout)]
        yield [sys.executable, "-I", "-m", "vtorque_slurm.requeue_helper", *words]
