"""Register the batch systems ``torque`` and ``openpbs``.

Imports are deferred to keep ``vsub`` fast.
"""

from __future__ import annotations

from vtorque_core.api import BatchSystem, constant_hook, deferred
from vtorque_pbs.settings import Settings

vtorque_settings = constant_hook(Settings)
_FACTS = frozenset({"queue", "account"})
_STEP = deferred("vtorque_pbs.batch_commands:step")
vtorque_batch_systems = constant_hook(
    BatchSystem(
        "torque",
        submitter=deferred("vtorque_pbs.submitter:torque_submitter"),
        node=deferred("vtorque_pbs.torque.node:create_node"),
        shell=deferred("vtorque_pbs.pbsdsh:TorqueShell"),
        facts=_FACTS,
        step=_STEP,
    ),
    BatchSystem(
        "openpbs",
        submitter=deferred("vtorque_pbs.submitter:openpbs_submitter"),
        node=deferred("vtorque_pbs.openpbs.node:create_node"),
        shell=deferred("vtorque_pbs.pbsdsh:OpenPbsShell"),
        facts=_FACTS,
        step=_STEP,
    ),
)
