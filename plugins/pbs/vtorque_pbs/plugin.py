"""Register the batch systems ``torque`` and ``openpbs``.

Imports are deferred to keep ``vsub`` fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vtorque_core.api import BatchSystem, constant_hook
from vtorque_pbs.settings import Settings

if TYPE_CHECKING:
    from vtorque_core.api.batch_system import JobShell, NodeAdapter, Submitter
    from vtorque_core.api.node_job import Site
    from vtorque_core.api.strategies import StepOf


def torque_submitter(site: Site) -> Submitter:
    """Return the submitter for Torque."""
    from vtorque_pbs.qsub_dialect import TORQUE  # noqa: PLC0415
    from vtorque_pbs.submitter import PbsSubmitter  # noqa: PLC0415

    return PbsSubmitter(TORQUE, site[Settings], site.paths.jobshell)


def openpbs_submitter(site: Site) -> Submitter:
    """Return the submitter for OpenPBS."""
    from vtorque_pbs.qsub_dialect import OPENPBS  # noqa: PLC0415
    from vtorque_pbs.submitter import PbsSubmitter  # noqa: PLC0415

    return PbsSubmitter(OPENPBS, site[Settings], site.paths.jobshell)


def torque_node(site: Site) -> NodeAdapter:
    """Return the node adapter for Torque."""
    from vtorque_pbs.torque.node import TorqueNode  # noqa: PLC0415

    return TorqueNode(site, site[Settings])


def openpbs_node(site: Site) -> NodeAdapter:
    """Return the node adapter for OpenPBS."""
    from vtorque_pbs.openpbs.node import OpenPbsNode  # noqa: PLC0415

    return OpenPbsNode(site, site[Settings])


def torque_shell() -> JobShell:
    """Return the job shell adapter for Torque."""
    from vtorque_pbs.pbsdsh import TorqueShell  # noqa: PLC0415

    return TorqueShell()


def openpbs_shell() -> JobShell:
    """Return the job shell adapter for OpenPBS."""
    from vtorque_pbs.pbsdsh import OpenPbsShell  # noqa: PLC0415

    return OpenPbsShell()


def step(site: Site) -> StepOf | None:
    """Return the function that runs a command on a job's node by ssh, if the site enables it."""
    from vtorque_pbs import batch_commands  # noqa: PLC0415

    return batch_commands.by_ssh if site[Settings].ssh else None


vtorque_settings = constant_hook(Settings)
_FACTS = frozenset({"queue", "account"})
vtorque_batch_systems = constant_hook(
    BatchSystem("torque", torque_submitter, torque_node, torque_shell, _FACTS, step),
    BatchSystem("openpbs", openpbs_submitter, openpbs_node, openpbs_shell, _FACTS, step),
)
