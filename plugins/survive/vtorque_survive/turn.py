"""Limit how many nodes are drained by their health checks at the same time.

A node first drains itself with a reason that starts with "requests a drain". It then counts other
drained nodes, and sets its final reason only if their number is below the limit. If too many nodes
request a drain, the nodes whose names sort first wait and count again. All other nodes
withdraw their requests.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Protocol, runtime_checkable

from vtorque_core.api import Refused, VtorqueError

ASKS = "requests a drain: "
_POLL, _TIME = 2.0, 60.0  # seconds between two counts, and in total


@runtime_checkable
class CountingAdapter(Protocol):
    """A node adapter that can count drained nodes.

    All methods raise HostFault if the batch system does not respond.
    """

    def drain(self, reason: str) -> None:
        """Drain this node, or replace the reason if vTorque has already drained it."""
        ...

    def drained(self) -> tuple[str, Mapping[str, str]]:
        """Return this node's name, and the names and reasons of all nodes that vTorque drained.

        Nodes with a note of the administrator are not included.

        Raises:
            Refused: If this node accepts jobs but has a note of the administrator.
        """
        ...

    def undrain(self) -> None:
        """Return this node to service if :meth:`drained` includes it."""
        ...


def take_turn(batch: object, most: int, reason: str) -> None:
    """Drain this node if fewer than ``most`` nodes are drained.

    Do nothing if vTorque has already drained this node.

    Raises:
        Refused: If ``most`` nodes are drained. This node is not changed.
    """
    if not isinstance(batch, CountingAdapter):
        raise Refused("this site's batch system does not report which nodes are drained")
    me, nodes = batch.drained()
    if me in nodes and not nodes[me].startswith(ASKS):
        return
    if me not in nodes and len(nodes) >= most:
        raise _refusal(list(nodes))
    batch.drain(ASKS + reason)
    try:
        _await_turn(batch, most)
    except VtorqueError:
        with suppress(VtorqueError):  # a mark that stays is used by the next attempt
            batch.undrain()
        raise
    batch.drain(reason)


def withdraw(batch: object) -> None:
    """Withdraw a drain request of this node that a killed process has left."""
    if isinstance(batch, CountingAdapter):
        me, nodes = batch.drained()
        if nodes.get(me, "").startswith(ASKS):
            batch.undrain()


def _await_turn(batch: CountingAdapter, most: int) -> None:
    until = time.monotonic() + _TIME
    while True:
        me, nodes = batch.drained()
        others = sorted(node for node in nodes if node != me)
        if len(others) < most:
            return
        ask = sorted(node for node, why in nodes.items() if why.startswith(ASKS))
        room = max(0, most - (len(nodes) - len(ask)))
        if me not in ask[:room] or time.monotonic() >= until:
            raise _refusal(others)
        time.sleep(_POLL)


def _refusal(others: list[str]) -> Refused:
    names = ", ".join(sorted(others)[:5])
    return Refused(
        f"not drained: {len(others)} other nodes are drained or about to be: {names} (limit: "
        "[plugin.survive] max_drained_nodes)"
    )
