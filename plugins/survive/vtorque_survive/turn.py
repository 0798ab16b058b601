"""Of the nodes that their health drains at most so many are drained at the same time.

A node marks itself in the batch system as one that asks, and then counts. It is drained only if
fewer than the most others have a mark of ours, whether they ask or are drained: of nodes that are
drained the last one to mark itself has counted all others. No clock is needed for that. Among those
that ask the first ones by name, as many as there is room for, count again; all others take their
mark back: so not all give up.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Protocol, runtime_checkable

from vtorque_core.api import Refused, VtorqueError

ASKS = "asks to be drained: "
_LOOK, _TIME = 2.0, 60.0  # seconds between two counts, and until it is given up


@runtime_checkable
class Counting(Protocol):
    """What a :class:`vtorque_core.api.batch_system.NodeAdapter` has if its drains can be counted.

    All raise HostFault if the batch system cannot be told.
    """

    def drain(self, reason: str) -> None:
        """See :class:`DrainingAdapter`; a new reason replaces one of ours."""
        ...

    def drained(self) -> tuple[str, Mapping[str, str]]:
        """Return this node's name, and which nodes :meth:`drain` has drained, each with its reason.

        Those on which the site has a note of its own are none of them. Raises Refused: this node
        is one, and gets jobs, so its drain could not be counted.
        """
        ...

    def undrain(self) -> None:
        """Have jobs come here again if :meth:`drained` has this node."""
        ...


def take(batch: object, most: int, reason: str) -> None:
    """Drain this node if it is its turn; a node that we have drained already stays so.

    Raises Refused: it is not, and nothing is changed; HostFault: the batch system cannot be told.
    """
    if not isinstance(batch, Counting):
        raise Refused("this site's batch system does not say which nodes are drained")
    me, nodes = batch.drained()
    if me in nodes and not nodes[me].startswith(ASKS):
        return
    if me not in nodes and len(nodes) >= most:
        raise _refusal(list(nodes))
    batch.drain(ASKS + reason)
    try:
        _await_turn(batch, most)
    except VtorqueError:
        with suppress(VtorqueError):  # it stays, and the next one goes on with it
            batch.undrain()
        raise
    batch.drain(reason)


def take_back(batch: object) -> None:
    """Have jobs come here again if this node asks, of which nobody is at it: it was killed.

    Raises HostFault, Refused.
    """
    if isinstance(batch, Counting):
        me, nodes = batch.drained()
        if nodes.get(me, "").startswith(ASKS):
            batch.undrain()


def _await_turn(batch: Counting, most: int) -> None:
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
        time.sleep(_LOOK)


def _refusal(others: list[str]) -> Refused:
    names = ", ".join(sorted(others)[:5])
    return Refused(f"not drained: {len(others)} others are, or are to be: {names} (drain_most)")
