"""The number of nodes that drain at once.

Threads replace the processes of the nodes, and a dict the batch system.
"""

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from vtorque_core.api import HostFault, Refused
from vtorque_survive import turn


class BatchNodeDouble:
    """A node of a batch system; ``waits`` is called before each action, with its name."""

    def __init__(self, name, marks, waits=lambda _what: None):
        self.name, self.marks, self.waits = name, marks, waits
        self.asks = 0

    def drain(self, reason):
        self.waits("drain")
        self.asks += (asks := reason.startswith(turn.ASKS))
        self.marks[self.name] = reason
        if asks:
            self.waits("asked")

    def drained(self):
        self.waits("count")
        return self.name, dict(self.marks)

    def undrain(self):
        self.waits("undrain")
        self.marks.pop(self.name, None)


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch):
    monkeypatch.setattr(turn, "_POLL", 0.001)


def is_granted(node, most):
    try:
        turn.take_turn(node, most, "ill")
    except Refused:
        return False
    return True


def all_at_once(nodes, most):
    with ThreadPoolExecutor(len(nodes)) as threads:
        return sum(threads.map(lambda node: is_granted(node, most), nodes))


@pytest.mark.parametrize(("count", "most", "drained"), [(2, 1, ()), (5, 2, ()), (4, 3, ("a", "z"))])
def test_concurrent_requests_drain_as_many_nodes_as_allowed(count, most, drained):
    marks = dict.fromkeys(drained, "ill")
    together, asks = threading.Barrier(count), threading.local()

    def waits(what):
        """Let all nodes check first, and then mark all before one counts."""
        if what == "asked" or (what == "drain" and not vars(asks)):
            asks.begun = True
            together.wait(60)

    nodes = [BatchNodeDouble(f"n{number}", marks, waits) for number in range(count)]
    room = most - len(drained)
    assert all_at_once(nodes, most) == room
    assert marks == dict.fromkeys([*drained, *(f"n{number}" for number in range(room))], "ill")


def test_random_order_never_drains_too_many_and_at_least_one():
    for seed in range(30):
        chance, marks, lock = random.Random(seed), {}, threading.Lock()  # noqa: S311

        def waits(_what, chance=chance, lock=lock):
            with lock:
                seconds = chance.random() * 0.002
            threading.Event().wait(seconds)

        granted = all_at_once(
            [BatchNodeDouble(f"n{number}", marks, waits) for number in range(4)], 2
        )
        assert 1 <= granted <= 2, seed
        assert list(marks.values()) == ["ill"] * granted


def test_node_above_the_limit_is_not_marked():
    marks = {"n1": "ill", "n2": "ill"}
    node = BatchNodeDouble("n3", marks)
    with pytest.raises(Refused, match=r"2 other nodes are drained or about to be: n1, n2"):
        turn.take_turn(node, 2, "ill")
    assert (node.asks, set(marks)) == (0, {"n1", "n2"})


def test_drained_node_is_not_counted_twice():
    marks = {"n1": "ill", "n2": "ill"}
    assert is_granted(BatchNodeDouble("n1", marks), 2) and marks["n1"] == "ill"


def test_request_repeated_after_a_kill_is_granted():
    marks = {"n1": f"{turn.ASKS}ill"}
    assert is_granted(BatchNodeDouble("n1", marks), 1) and marks == {"n1": "ill"}


def test_take_back_removes_the_request_but_not_the_drain():
    marks = {"n1": f"{turn.ASKS}ill", "n2": "ill"}
    for name in ("n1", "n2", "n3"):
        turn.withdraw(BatchNodeDouble(name, marks))
    assert marks == {"n2": "ill"}


def test_request_that_is_never_completed_times_out_for_others(monkeypatch):
    """The requester may continue, so no other node is drained in its place."""
    monkeypatch.setattr(turn, "_TIME", 0.01)
    marks = {"n1": f"{turn.ASKS}ill"}
    assert not is_granted(BatchNodeDouble("n2", marks), 1)
    marks["n3"] = f"{turn.ASKS}ill"
    del marks["n1"]
    assert not is_granted(BatchNodeDouble("n2", marks), 1) and set(marks) == {"n3"}


def test_batch_system_without_drain_states_refuses_health_drains():
    with pytest.raises(Refused, match="does not report which nodes are drained"):
        turn.take_turn(object(), 1, "ill")


def test_mark_is_removed_if_the_batch_system_does_not_answer():
    marks = {}

    def waits(what, seen=[]):  # noqa: B006
        seen.append(what)
        if seen.count("count") == 2 and what == "count":
            raise HostFault("no answer")

    with pytest.raises(HostFault, match="no answer"):
        turn.take_turn(BatchNodeDouble("n1", marks, waits), 1, "ill")
    assert marks == {}
