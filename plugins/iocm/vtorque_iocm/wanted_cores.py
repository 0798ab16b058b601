"""Decide how many I/O cores a guest should have, from its load. Pure: no clock, no host access.

The load is the CPU time per second that the I/O threads used or waited for, in cores. A guest needs
``load / busy`` cores. It gets more after ``up`` ticks in a row that need more, and fewer after
``down`` ticks for which fewer cores would suffice with ``slack`` to spare. The slack is a
hysteresis that prevents oscillation at a constant load.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Rule:
    """Limits and thresholds. ``busy`` is 0 to 1, ``slack`` in cores, ``up``, ``down`` in ticks."""

    least: int
    most: int
    busy: float = 0.8
    slack: float = 0.25
    up: int = 2
    down: int = 10


@dataclass(frozen=True)
class State:
    """The cores of a guest, and the change that its recent load asks for.

    Attributes:
        cores: the current number of cores.
        wish: the number that the load has asked for during ``ticks``; 0 if no change is needed.
        ticks: the number of consecutive ticks that asked for a change in this direction.
        pause: ticks without a decision, after a change was not possible.
    """

    cores: int
    wish: int = 0
    ticks: int = 0
    pause: int = 0


def decide(state: State, load: float, rule: Rule) -> State:
    """Return the next state; its ``cores`` is the number that the guest should have."""
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
