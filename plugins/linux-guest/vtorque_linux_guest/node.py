"""What the Linux guest plugin does on the node: settings, resources, health checks."""

from __future__ import annotations

from collections.abc import Iterator

from vtorque_core.api import hookimpl
from vtorque_core.api_node import HealthCheck, Resource
from vtorque_linux_guest.health import agent_check, scripts_check
from vtorque_linux_guest.seed import Seed
from vtorque_linux_guest.settings import Settings


@hookimpl
def vtorque_settings() -> Iterator[type[Settings]]:
    """Yield ``[plugin.linux-guest]``."""
    yield Settings


@hookimpl
def vtorque_resources() -> Iterator[type[Resource]]:
    """Yield what a Linux guest needs on the node beside the core's own kinds."""
    yield Seed


@hookimpl
def vtorque_health_checks() -> Iterator[HealthCheck]:
    """Yield the checks for ``vtorque doctor``."""
    yield HealthCheck("linux guest agent", agent_check)
    yield HealthCheck("linux guest scripts", scripts_check)
