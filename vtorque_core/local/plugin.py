"""The batch system ``local``: for one machine, installed with the core, registered as a plugin."""

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
    """``[plugin.local]``."""

    slots: int = setting(1, doc="jobs that run at the same time")


def submitter(site: Site) -> Submitter:
    """Return the submitting half; ``site`` gives the socket's directory."""
    from vtorque_core.local.submitter import LocalSubmitter  # noqa: PLC0415

    return LocalSubmitter(site.paths)


def node(site: Site) -> NodeAdapter:
    """Return the node half; ``site`` gives the queue's directory."""
    from vtorque_core.local.node import LocalNode  # noqa: PLC0415

    return LocalNode(site.paths.state / "local")


def shell() -> JobShell:
    """Return the job part, which is Torque's."""
    from vtorque_core.batch.jobshell import PbsJobShell  # noqa: PLC0415

    return PbsJobShell()


@hookimpl
def vtorque_settings() -> Iterator[type[Settings]]:
    """Declare ``[plugin.local]``."""
    yield Settings


@hookimpl
def vtorque_batch_systems() -> Iterator[BatchSystem]:
    """Bring ``local``."""
    yield BatchSystem("local", submitter=submitter, node=node, shell=shell)
