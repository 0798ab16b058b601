"""Health checks that a plugin adds to ``vtorque doctor``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from vtorque_core.api.node_job import Site

ALIKE = "alike on all nodes"  # name of the check whose ``key: value`` lines must be equal
LEAST_FREE = 1024  # MiB that should be free on each disk to which vTorque writes


@dataclass(frozen=True)
class HealthResult:
    """One line of ``vtorque doctor``. ``fix`` says what to do about a warning or failure."""

    status: Literal["ok", "warning", "failed"]
    message: str
    fix: str = ""


def ok(message: str) -> HealthResult:
    """Return the result of a passed check."""
    return HealthResult("ok", message)


def failure(message: str, fix: str) -> HealthResult:
    """Return the result of a failed check."""
    return HealthResult("failed", message, fix)


def warning(message: str, fix: str) -> HealthResult:
    """Return a result with a warning."""
    return HealthResult("warning", message, fix)


@dataclass(frozen=True)
class HealthCheck:
    """A named check. ``check`` runs as the caller of ``vtorque doctor``."""

    name: str
    check: Callable[[Site], Iterable[HealthResult]]
