"""Decide from a guest's load how many I/O cores the guest should have.

The load is the CPU time per second that the I/O threads used or waited for, in cores. An I/O core
should be in use for the fraction ``busy`` of the time, so a guest needs ``load / busy`` cores. The
load is measured once per interval, called a tick. The guest gets more cores after ``up``
consecutive ticks in which it needs more cores than it has. The guest gets fewer cores after
``down`` consecutive ticks in which its need plus ``slack``, rounded up, is less than it has.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class CoresRule:
    """The parameters of :func:`decide` for one guest.

    Attributes:
        least: minimum number of I/O cores.
        most: maximum number of I/O cores.
        busy: intended load of an I/O core, 0 to 1. A guest needs ``load / busy`` cores.
        slack: cores that a guest keeps beyond its need when it gets fewer cores.
        up: consecutive ticks with too few cores, after which the guest gets more.
        down: consecutive ticks with too many cores, after which the guest gets fewer.
    """

    least: int
    most: int
    busy: float = 0.8
    slack: float = 0.25
    up: int = 2
    down: int = 10


@dataclass(frozen=True)
class CoresState:
    """A guest's number of I/O cores, and the change that its recent load requires.

    Attributes:
        cores: current number of cores.
        wish: number of cores that the recent ticks required; 0 if no change is needed.
        ticks: number of consecutive ticks that required a change in the same direction.
        pause: remaining ticks without a decision, after a change failed.
    """

    cores: int
    wish: int = 0
    ticks: int = 0
    pause: int = 0


def decide(state: CoresState, load: float, rule: CoresRule) -> CoresState:
    """Return the next state; its ``cores`` is the number that the guest should have."""
    if state.pause:
        return CoresState(state.cores, pause=state.pause - 1)
    needed = load / rule.busy
    enough, plenty = (
        min(rule.most, max(rule.least, math.ceil(cores))) for cores in (needed, needed + rule.slack)
    )
    # ``goes_on``: the previous tick required a change in the same direction. The wish is the
    # smallest change that one of these ticks required.
    if enough > state.cores:
        goes_on = state.wish > state.cores
        wish, patience = min(enough, state.wish) if goes_on else enough, rule.up
    elif plenty < state.cores:
        goes_on = 0 < state.wish < state.cores
        wish, patience = max(plenty, state.wish) if goes_on else plenty, rule.down
    else:
        return CoresState(state.cores)
    ticks = state.ticks + 1 if goes_on else 1
    return CoresState(wish) if ticks >= patience else CoresState(state.cores, wish, ticks)
