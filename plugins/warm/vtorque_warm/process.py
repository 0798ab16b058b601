"""The service as hooks and commands see it: how it is started, and what it says of itself. Root.

A hook imports this and not the service.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from vtorque_core.api import HostFault, Paths
from vtorque_core.live import spares
from vtorque_core.live.node_process import NodeProcess

NAME = "warm"


class Service(NodeProcess):
    """One for a node: see the module that it runs. No job's: nobody's journal names it."""

    kind = "warm-service"
    name = NAME
    module = "vtorque_warm.service"


def ensure(paths: Paths, config: Path) -> bool:
    """Start it unless it is there; return whether it was started. Raises HostFault."""
    service = Service.of(paths, config)
    if not service.lost():
        return False
    try:
        service.create()
    except HostFault:
        if service.lost():
            raise
        return False  # another has started it
    return True


def end_all(paths: Paths) -> None:
    """End it, then all guests that no job has. Raises HostFault: what is left is the reaper's."""
    Service.of(paths).release()
    for each in spares.spares(paths):
        try:
            spares.end(paths, each.key)
        except HostFault as error:
            raise HostFault(f"{each.key}: {error}; vtorque reap tries again") from None


def state_file(paths: Paths) -> Path:
    """Return where it says what it wants and what has failed."""
    return paths.run / f"{NAME}.json"


def said(paths: Paths) -> dict[str, Any]:
    """Return what it has said last; empty: nothing."""
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(state_file(paths).read_text(encoding="utf-8"))
        if isinstance(found, dict):
            return found
    return {}
