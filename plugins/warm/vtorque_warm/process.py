"""Start and query the service of warm guests without importing its code. Needs root."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from vtorque_core.api import HostFault, Paths
from vtorque_core.live.node_process import NodeProcess

NAME = "warm"


class WarmService(NodeProcess):
    """The service that keeps warm guests. It belongs to no job, so it is in no job's journal."""

    kind = "warm-service"
    name = NAME
    module = "vtorque_warm.service"


def ensure(paths: Paths, config: Path) -> bool:
    """Start the service if it is not running. Return whether this call has started it."""
    service = WarmService.for_node(paths, config)
    if not service.is_lost():
        return False
    try:
        service.create()
    except HostFault:
        if service.is_lost():
            raise
        return False  # another process has started it
    return True


def end_all(paths: Paths) -> None:
    """End the service, then all warm guests that no job uses.

    The reaper later ends guests that remain.
    """
    from vtorque_core.live import spares  # noqa: PLC0415 - hooks that import this do not need it

    WarmService.for_node(paths).release()
    for each in spares.warm_guests(paths):
        try:
            spares.end(paths, each.key)
        except HostFault as error:
            raise HostFault(f"{each.key}: {error}; vtorque reap retries the release") from None


def state_file(paths: Paths) -> Path:
    """Return the service's status file."""
    return paths.run / f"{NAME}.json"


def read_status(paths: Paths) -> dict[str, Any]:
    """Return the service's last status; empty if there is none."""
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(state_file(paths).read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return found
    return {}
