"""Creating and ending machines once, despite kills and failures."""

import dataclasses
import os

import pytest

from directory_cloud import DirectoryDriver
from vtorque_core.api import Busy, HostFault, take_lock
from vtorque_pool.api import CloudFault, Machine, StockOut
from vtorque_pool.machines import Machines
from vtorque_pool.memory import PoolState
from vtorque_pool.settings import MachineShape, Settings


@pytest.fixture
def pool(tmp_path):
    return Pool(tmp_path)


class Pool:
    def __init__(self, top, **more):
        self.cloud = top / "cloud"
        self.cloud.mkdir()
        self.said = []
        shape = MachineShape("small", "n[1-9]", "here")
        given = {"max_failures": 2, "timeout": 1, "state": str(top / "state"), **more}
        self.settings = Settings("test", (shape,), {"here": {"driver": "double"}}, **given)
        self.driver = DirectoryDriver(self.cloud)
        self.machines = Machines(self.settings, {"here": self.driver}, self.said.append)

    def nodes(self):
        return sorted(m.node for m in DirectoryDriver(self.cloud).machines("test"))


def test_second_call_creates_no_second_machine(pool):
    first = pool.machines.make(["n1", "n2"], "test")
    again = pool.machines.make(["n1", "n2", "n3"], "test")
    assert {again[n].id for n in first} == {m.id for m in first.values()}
    assert pool.nodes() == ["n1", "n2", "n3"]


def test_machine_created_despite_a_lost_answer_is_used(pool, monkeypatch):
    make = pool.driver.create

    def lost(order):
        make(order)
        raise CloudFault("no answer after 60 s")

    monkeypatch.setattr(pool.driver, "create", lost)
    answers = pool.machines.make(["n1"], "test")
    assert isinstance(answers["n1"], Machine)
    assert pool.nodes() == ["n1"]
    assert any("was created although the cloud reported" in line for line in pool.said)


def test_machine_created_twice_is_ended_once(pool, monkeypatch):
    make = pool.driver.create

    def twice(order):
        make(order)
        return make(order)

    monkeypatch.setattr(pool.driver, "create", twice)
    pool.machines.make(["n1"], "test")
    assert pool.nodes() == ["n1"]


def test_machine_listed_twice_counts_once(pool, monkeypatch):
    """A cloud may list a machine on two pages, and two clouds may use one account."""
    listed = pool.driver.machines
    monkeypatch.setattr(pool.driver, "machines", lambda cluster: listed(cluster) * 2)
    settings = dataclasses.replace(pool.settings, clouds={"here": {"driver": "double"}})
    both = Machines(settings, {"here": pool.driver, "there": pool.driver}, pool.said.append)
    both.make(["n1"], "test")
    both.make(["n1"], "again")
    assert pool.nodes() == ["n1"]
    assert [each.node for each in both.list_machines().machines] == ["n1"]


def test_machine_of_a_shape_that_moved_to_another_cloud_is_ended(pool, tmp_path):
    pool.machines.make(["n1"], "test")
    (tmp_path / "new").mkdir()
    (shape,) = pool.settings.shapes
    clouds = {name: {"driver": "double"} for name in ("here", "new")}
    shapes = (dataclasses.replace(shape, cloud="new"),)
    settings = dataclasses.replace(pool.settings, shapes=shapes, clouds=clouds)
    drivers = {"here": pool.driver, "new": DirectoryDriver(tmp_path / "new")}
    assert Machines(settings, drivers, pool.said.append).end(["n1"], "test") == {}
    assert pool.nodes() == []


def test_nodes_with_one_common_timeout_count_as_one_failure(pool):
    assert pool.machines.count_failures({f"n{number}": "timeout" for number in range(1, 9)}) == {}
    assert pool.machines.count_failures({"n1": "timeout"}) == {"small": "timeout"}


@pytest.mark.parametrize("step", ["create", "after-create", "destroy", "after-destroy"])
def test_kill_at_any_step_leaves_no_unknown_machine(pool, monkeypatch, step):
    """The same call again completes it: no second machine, none left."""
    pid = os.fork()
    if pid == 0:
        name = step.removeprefix("after-")
        real = getattr(pool.driver, name)

        def killed(thing):
            if step.startswith("after-"):
                real(thing)
            os._exit(9)

        setattr(pool.driver, name, killed)
        try:
            pool.machines.make(["n1"], "test")
            pool.machines.end(["n1"], "test")
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    pool.machines.make(["n1"], "test")
    assert pool.nodes() == ["n1"]
    assert pool.machines.end(["n1"], "test") == {}
    assert pool.nodes() == []


def test_silent_cloud_is_reported_for_each_node_and_nothing_is_created(pool):
    (pool.cloud / "down").touch()
    answers = pool.machines.make(["n1"], "test")
    assert isinstance(answers["n1"], CloudFault)
    assert "no answer" in pool.machines.end(["n1"], "test")["n1"]
    assert pool.machines.list_machines().silent == {"here": "no answer"}


def test_no_machine_is_created_beyond_the_quota(pool, monkeypatch):
    monkeypatch.setattr(pool.driver, "quota", lambda: 1)
    answers = pool.machines.make(["n1", "n2"], "test")
    assert isinstance(answers["n2"], StockOut)
    assert pool.driver.asked == ["n1"]


def test_failures_pause_a_shape_until_released(pool):
    (pool.cloud / "full").touch()
    for node in ("n1", "n2"):
        answers = pool.machines.make([node], "test")
        paused = pool.machines.count_failures({n: str(each) for n, each in answers.items()})
    assert paused == {"small": "full"}
    pool.driver.asked.clear()
    assert isinstance(pool.machines.make(["n3"], "test")["n3"], StockOut)
    assert pool.driver.asked == []
    (pool.cloud / "full").unlink()
    with pool.machines.memory.edit() as remembered:
        remembered.release("small")
    assert isinstance(pool.machines.make(["n3"], "test")["n3"], Machine)


def test_held_node_is_kept(pool):
    pool.machines.make(["n1"], "test")
    with pool.machines.memory.edit() as remembered:
        remembered.held["n1"] = "a look"
    assert pool.machines.end(["n1"], "test") == {}
    assert pool.nodes() == ["n1"]
    assert pool.machines.end(["n1"], "test", even_held=True) == {}
    assert pool.nodes() == []


def test_node_locked_by_another_process_is_skipped(pool):
    lock = take_lock(pool.machines.memory.directory / "nodes" / "n1", 0)
    try:
        assert isinstance(pool.machines.make(["n1", "n2"], "test")["n1"], Busy)
        assert pool.machines.is_busy("n1")
    finally:
        os.close(lock)
    assert pool.nodes() == ["n2"]
    assert not pool.machines.is_busy("n1")


def test_node_without_a_shape_is_refused(pool):
    assert isinstance(pool.machines.make(["other"], "test")["other"], HostFault)


def test_registration_time_of_a_machine_counts_once(pool):
    memory = pool.machines.memory
    with memory.edit() as remembered:
        remembered.fail("small", "full", 100.0, 9, 1800.0)
        remembered.record_registration("m-1", "small", 100.0, 130.0)
    with memory.edit() as remembered:
        remembered.record_registration("m-1", "small", 100.0, 190.0)
    read = memory.read()
    assert (read.shape_counters("small").registered, read.shape_counters("small").seconds) == (
        1,
        30.0,
    )
    assert read.failed == {}


@pytest.mark.parametrize(
    "text",
    [
        '{"held": ', "[]", "null", "7", '{"held": ["n1"]}', '{"held": null}',
        '{"paused": {"s": {}}}',
        '{"failed": {"s": 7}}', '{"counted": {"s": {}}}', '{"counted": {"s": {"starts": "x"}}}',
    ],
)  # fmt: skip
def test_invalid_state_file_is_replaced_and_reported_once(pool, text):
    directory = pool.machines.memory.directory
    directory.mkdir()
    (directory / "memory.json").write_text(text)
    for _ in range(2):
        assert pool.machines.memory.read() == PoolState()
    assert [
        line
        for line in pool.said
        if "memory.bad: invalid state file: holds, pauses and counts are lost:" in line
    ]
    assert len(pool.said) == 1
    assert (directory / "memory.bad").read_text() == text
    pool.machines.make(["n1"], "test")
    assert pool.machines.memory.read().shape_counters("small").starts == 1


def test_state_is_read_back_as_written(pool):
    with pool.machines.memory.edit() as written:
        written.held["n1"] = "a look"
        written.fail("small", "full", 100.0, 1, 1800.0)
        written.record_registration("m-1", "other", 100.0, 130.0)
    assert pool.machines.memory.read() == written
