"""The rule follows the load without oscillation: simulated steps, noise and random loads."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from vtorque_iocm.wanted_cores import CoresRule, CoresState, decide

RULES = st.builds(
    lambda least, more, busy, up, down: CoresRule(least, least + more, busy, up=up, down=down),
    st.integers(1, 4),
    st.integers(0, 6),
    st.floats(0.3, 0.95),
    st.integers(1, 4),
    st.integers(5, 15),
)
LEVELS = st.floats(0, 12)
NOISE = st.lists(  # parts of the slack, each for some ticks
    st.tuples(st.floats(-0.45, 0.45), st.integers(1, 20)), min_size=1, max_size=5
)


def settled_by(rule):
    """Return the ticks in which the cores must have followed a step of the load.

    Twice ``down``: a change decided before the step may happen first.
    """
    return 2 * rule.down + rule.up * (rule.most - rule.least + 1)


def run(rule, loads, seen=lambda load, cores: load):
    """Return the cores after each tick; ``seen`` is the measured value of a load on some cores."""
    state, history = CoresState(rule.least), []
    for load in loads:
        state = decide(state, seen(load, state.cores), rule)
        history.append(state.cores)
    return history


def changes(history, start):
    """Return +1 or -1 for each change."""
    pairs = zip([start, *history], history, strict=False)
    return [1 if new > old else -1 for old, new in pairs if new != old]


def reversals(moves):
    return sum(a != b for a, b in itertools.pairwise(moves))


def fits(load, cores, rule, noise=0.0):
    """Return whether the number of cores is right, within limits and slack."""
    needed = load / rule.busy
    enough = needed - noise <= cores + 1e-9 or cores == rule.most
    thrifty = cores == rule.least or needed + noise + rule.slack > cores - 1 - 1e-9
    return enough and thrifty


def test_rule_follows_a_step_up_and_down():
    rule = CoresRule(1, 4)
    history = run(rule, [0.2] * 5 + [2.9] * 20 + [0.2] * 20)
    assert history[:6] == [1] * 6  # one tick is not enough
    assert history[6:34] == [4] * 28
    assert history[34:] == [1] * 11


def test_spikes_and_lulls_change_nothing():
    assert set(run(CoresRule(1, 4), ([0.1] * 5 + [3.9]) * 20)) == {1}
    assert set(run(CoresRule(1, 4), [3.0] * 5 + ([3.0] + [0.0] * 9) * 20)[2:]) == {4}


def test_rule_adds_the_fewest_cores_that_recent_ticks_need():
    assert run(CoresRule(1, 4), [0.1, 1.0, 3.1])[-1] == 2
    assert run(CoresRule(1, 4), [3.1] * 2 + [1.3] * 9 + [0.0])[-1] == 2


def test_unavailable_core_is_not_requested_again_immediately():
    rule = CoresRule(1, 4)
    state = CoresState(1, pause=rule.down)
    asked = 0
    for _ in range(rule.down):
        state = decide(state, 4.0, rule)
        asked += state.cores != 1
    assert asked == 0
    assert run(rule, [4.0] * 3)[-1] == 4


@given(RULES, st.lists(st.tuples(st.integers(0, 10), NOISE), min_size=1, max_size=6))
@settings(max_examples=4 * settings().max_examples, deadline=None)
def test_rule_follows_noisy_steps_without_oscillation(rule, steps):
    """The levels at which one more core is needed: noise there can make a rule oscillate."""
    state = CoresState(rule.least)
    for cores, runs in steps:
        noise = list(itertools.chain.from_iterable([part] * ticks for part, ticks in runs))
        loads = itertools.cycle(max(0.0, cores + part * rule.slack) * rule.busy for part in noise)
        history = []
        for load in itertools.islice(loads, settled_by(rule) + 2 * len(noise)):
            history.append(state.cores)
            state = decide(state, load, rule)
        moves = changes([*history[1:], state.cores], history[0])
        assert reversals(moves) == 0, "the number of cores oscillates under a steady load"
        assert len(moves) <= rule.most - rule.least
        assert fits(cores * rule.busy, state.cores, rule, 0.45 * rule.slack)


@given(RULES, st.lists(LEVELS, min_size=1, max_size=6))
@settings(max_examples=2 * settings().max_examples, deadline=None)
def test_rule_follows_a_load_without_known_wait_times(rule, levels):
    """If the wait is unknown, the measured load never exceeds the number of cores."""
    hold = settled_by(rule) + rule.down * (rule.most - rule.least)
    state = CoresState(rule.least)
    for level in levels:
        history = []
        for _ in range(hold):
            state = decide(state, min(level, float(state.cores)), rule)
            history.append(state.cores)
        assert fits(level, history[-1], rule)
        assert reversals(changes(history, history[0])) == 0


@given(RULES, st.lists(LEVELS, min_size=1, max_size=400))
@settings(max_examples=2 * settings().max_examples, deadline=None)
def test_any_load_changes_the_cores_seldom_and_within_limits(rule, loads):
    history = run(rule, loads)
    assert all(rule.least <= cores <= rule.most for cores in history)
    moves = changes(history, rule.least)
    assert moves.count(-1) <= len(loads) / rule.down
    assert reversals(moves) <= 2 * len(loads) / rule.down + 1
    assert len(moves) <= len(loads) / rule.up
