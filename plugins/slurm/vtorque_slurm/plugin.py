"""Register the batch system ``slurm``. Imports are deferred to keep submission fast."""

from __future__ import annotations

from vtorque_core.api import BatchSystem, constant_hook, deferred, hookimpl
from vtorque_slurm.settings import Settings

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
