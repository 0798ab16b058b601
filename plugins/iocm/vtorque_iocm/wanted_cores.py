"""How many I/O cores a guest should have, from its measured load. Pure: no clock, no host.

The load is in cores: CPU time that the guest's I/O threads used or waited for, per second. A guest
needs ``load / busy`` cores. It gets more when it needs more for ``up`` ticks in a row, and fewer
when these would do with ``slack`` cores to spare for ``down`` ticks. The slack is the hysteresis:
what has just been given is not taken back at the same load, and the other way round.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Rule:
    """``least`` to ``most`` cores, ``busy`` from 0 to 1, ``slack`` in cores; the rest in ticks."""

    least: int
    most: int
    busy: float = 0.8
    slack: float = 0.25
    up: int = 2
    down: int = 10


@dataclass(frozen=True)
class State:
    """What a guest has, and for how many ``ticks`` in a row its load wants ``wish`` or beyond.

    ``wish`` is 0 while the load wants no other number of cores than there are. ``pause``: ticks for
    which nothing is decided, since the last change was not possible.
    """

    cores: int
    wish: int = 0
    ticks: int = 0
    pause: int = 0


def decide(state: State, load: float, rule: Rule) -> State:
    """Return the next state: the guest should have its ``cores``."""
    if state.pause:
        return State(state.cores, pause=state.pause - 1)
    needed = load / rule.busy
    enough, plenty = (
        min(rule.most, max(rule.least, math.ceil(cores))) for cores in (needed, needed + rule.slack)
    )
    # ``goes_on``: the tick before wanted the same, more or fewer. The wish of such ticks in a row
    # is the smallest change of theirs: all of them want at least that.
    if enough > state.cores:
        goes_on = state.wish > state.cores
        wish, patience = min(enough, state.wish) if goes_on else enough, rule.up
    elif plenty < state.cores:
        goes_on = 0 < state.wish < state.cores
        wish, patience = max(plenty, state.wish) if goes_on else plenty, rule.down
    else:
        return State(state.cores)
    ticks = state.ticks + 1 if goes_on else 1
    return State(wish) if ticks >= patience else State(state.cores, wish, ticks)
