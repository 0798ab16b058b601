"""Declares ``torque`` and ``openpbs``; what ``vsub`` imports of this plugin."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from vtorque_core.api import BatchSystem, hookimpl
from vtorque_pbs.settings import Settings

if TYPE_CHECKING:
    from vtorque_core.api_batch import JobShell, NodeAdapter, Submitter
    from vtorque_core.api_node import Site


def torque_submitter(site: Site) -> Submitter:
    """Return Torque's submitting half."""
    from vtorque_pbs.dialect import TORQUE  # noqa: PLC0415
    from vtorque_pbs.submitter import PbsSubmitter  # noqa: PLC0415

    return PbsSubmitter(TORQUE, site[Settings], site.paths.jobshell)


def openpbs_submitter(site: Site) -> Submitter:
    """Return OpenPBS's submitting half."""
    from vtorque_pbs.dialect import OPENPBS  # noqa: PLC0415
    from vtorque_pbs.submitter import PbsSubmitter  # noqa: PLC0415

    return PbsSubmitter(OPENPBS, site[Settings], site.paths.jobshell)


def torque_node(site: Site) -> NodeAdapter:
    """Return Torque's node half."""
    from vtorque_pbs.torque import TorqueNode  # noqa: PLC0415

    return TorqueNode(site, site[Settings])


def openpbs_node(site: Site) -> NodeAdapter:
    """Return OpenPBS's node half."""
    from vtorque_pbs.openpbs import OpenPbsNode  # noqa: PLC0415

    return OpenPbsNode(site, site[Settings])


def torque_shell() -> JobShell:
    """Return Torque's job part."""
    from vtorque_pbs.shell import TorqueShell  # noqa: PLC0415

    return TorqueShell()


def openpbs_shell() -> JobShell:
    """Return OpenPBS's job part."""
    from vtorque_pbs.shell import OpenPbsShell  # noqa: PLC0415

    return OpenPbsShell()


@hookimpl
def vtorque_settings() -> Iterator[type[Settings]]:
    """Declare ``[plugin.pbs]``."""
    yield Settings


@hookimpl
def vtorque_batch_systems() -> Iterator[BatchSystem]:
    """Bring both."""
    yield BatchSystem("torque", submitter=torque_submitter, node=torque_node, shell=torque_shell)
    yield BatchSystem(
        "openpbs", submitter=openpbs_submitter, node=openpbs_node, shell=openpbs_shell
    )
