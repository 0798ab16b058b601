"""Declares ``torque`` and ``openpbs``; what ``vsub`` imports of this plugin."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vtorque_core.api import BatchSystem, hookimpl, setting

if TYPE_CHECKING:
    from vtorque_core.api_batch import JobShell, NodeAdapter, Submitter
    from vtorque_core.api_node import Site


@dataclass(frozen=True)
class Settings:
    """``[plugin.pbs]``."""

    bin: str = setting("", doc="directory of qsub, qstat, qmgr, pbsnodes; empty: search PATH")
    home: str = setting(
        "", doc="the nodes' PBS_HOME; empty: /var/spool/torque or /var/spool/pbs, by system"
    )
    property: str = setting(
        "vtorque",
        doc="Torque: node property, OpenPBS: boolean resource, of the nodes that run VM jobs; "
        "empty: VM jobs ask for none",
    )
    node: str = setting("", doc="this node's name in the batch system; empty: the host name")
    prologue_alarm: float = setting(
        600.0,
        doc="Torque: the least $prologalarm; at least [node] start_timeout, teardown_timeout, and "
        "70 s for the site's own prologue and what pbs_mom takes off; more for a slow server",
        unit="s",
    )
    epilogue_alarm: float = setting(
        120.0,
        doc="OpenPBS: alarm of the execjob_end hook; at least teardown_timeout and 20 s",
        unit="s",
    )
    attempts: int = setting(
        3, doc="starts of a job that nodes could not provide its guests for, before it is held"
    )

    def __post_init__(self) -> None:
        """Refuse what could not be used. Raises ValueError."""
        for name in ("bin", "home"):
            value = getattr(self, name)
            if value and not Path(value).is_absolute():
                raise ValueError(f"{name} is {value!r}: write an absolute path, or nothing")
        if self.property and not (self.property.isascii() and self.property.isidentifier()):
            raise ValueError(f"property is {self.property!r}: write letters, digits and _")
        if self.attempts < 1:
            raise ValueError(f"attempts is {self.attempts}: the least is 1")


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
