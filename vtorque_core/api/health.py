"""What ``vtorque doctor`` asks of a plugin: a named check, and its lines."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from vtorque_core.api.node_job import Site

ALIKE = "alike on all nodes"  # the check whose lines say what must be the same: ``what: value``
LEAST_FREE = 1024  # MiB of a disk that vTorque writes to


@dataclass(frozen=True)
class HealthResult:
    """One line of ``vtorque doctor``. ``fix`` says what to do when not ok."""

    status: Literal["ok", "warning", "failed"]
    message: str
    fix: str = ""


def ok(message: str) -> HealthResult:
    """Return a passed check."""
    return HealthResult("ok", message)


def failed(message: str, fix: str) -> HealthResult:
    """Return a failed check with what to do."""
    return HealthResult("failed", message, fix)


def warning(message: str, fix: str) -> HealthResult:
    """Return a check that passed with a reservation."""
    return HealthResult("warning", message, fix)


@dataclass(frozen=True)
class HealthCheck:
    """A named check for ``vtorque doctor``; ``check`` runs as the calling user, maybe root."""

    name: str
    check: Callable[[Site], Iterable[HealthResult]]
