"""Decisions of a round on Torque and OpenPBS."""

import dataclasses

from vtorque_pool.api import Machine
from vtorque_pool.machines import CloudState
from vtorque_pool.pbs import QueuedJob
from vtorque_pool.rounds import NodeTimes, View, steps
from vtorque_pool.settings import MachineShape, Settings
from vtorque_pool.slurm import PoolNode

NOW = 10_000.0
SMALL = MachineShape("small", "n[1-4]", "here", cpus=2)
SETTINGS = Settings(
    "test", (SMALL,), {"here": {"driver": "static"}}, batch="torque", max_creating=3
)


def machine(node, age=60.0, state="running", name=""):
    return Machine(name or f"m-{node}", node, "small", NOW - age, state)


def view(machines=(), nodes=(), waiting=(), settings=SETTINGS, idle=None, down=0.0, **more):
    since = NodeTimes()
    known = {node.name: node for node in nodes}
    since.update(known, NOW)
    since.idle.update(idle or {})
    since.unusable.update({name: at - down for name, at in since.unusable.items()})
    given = {"held": {}, "paused": frozenset(), "silent": {}, "seen": (), **more}
    found = CloudState(tuple(machines), given.pop("silent"))
    return View(settings, found, known, waiting, since, now=NOW, **given)


def acts(found):
    return [(step.kind, step.node) for step in steps(found)]


def jobs(count, cpus=1, nodes=1, queue="batch", **more):
    return [QueuedJob(f"{n}", queue, nodes, cpus, **more) for n in range(count)]


def test_waiting_jobs_start_as_many_nodes_as_their_cpus_need():
    assert acts(view(waiting=jobs(3))) == [("start", "n1"), ("start", "n2")]


def test_concurrent_starts_are_limited():
    assert acts(view(waiting=jobs(20))) == [("start", "n1"), ("start", "n2"), ("start", "n3")]
    building = [machine("n1"), machine("n2")]
    nodes = [PoolNode("n1", "unusable"), PoolNode("n2", "unusable")]
    assert acts(view(building, nodes, jobs(20))) == [("start", "n3")]


def test_free_and_starting_nodes_are_not_started_again():
    nodes = [PoolNode("n1", "free"), PoolNode("n2", "unusable")]
    assert acts(view([machine("n1"), machine("n2")], nodes, jobs(4))) == []


def test_job_that_fits_no_shape_starts_nothing():
    waiting = [*jobs(2, cpus=3), *jobs(2, nodes=5), *jobs(1, features=frozenset({"gpu"}))]
    assert acts(view(waiting=waiting)) == []


def test_queue_limit_bounds_started_nodes():
    limited = dataclasses.replace(SETTINGS, queues={"batch": 2})
    assert acts(view(waiting=jobs(20, cpus=2), settings=limited)) == [
        ("start", "n1"),
        ("start", "n2"),
    ]


def test_account_limit_bounds_only_its_own_nodes():
    limited = dataclasses.replace(SETTINGS, accounts={"acme": 1, "": 0})
    waiting = [*jobs(9, cpus=2, account="acme"), *jobs(9), *jobs(2, cpus=2, account="other")]
    assert acts(view(waiting=waiting, settings=limited)) == [
        ("start", "n1"),
        ("start", "n2"),
        ("start", "n3"),
    ]
    assert acts(view(waiting=waiting[:18], settings=limited)) == [("start", "n1")]


def test_min_nodes_are_started_without_jobs_and_kept():
    least = dataclasses.replace(SETTINGS, shapes=(dataclasses.replace(SMALL, min_nodes=1),))
    assert acts(view(settings=least)) == [("start", "n1")]
    nodes = [PoolNode("n1", "free"), PoolNode("n2", "free")]
    machines = [machine("n1"), machine("n2")]
    idle = {"n1": NOW - 700, "n2": NOW - 700}
    assert acts(view(machines, nodes, settings=least, idle=idle)) == [("drain", "n2")]


def test_idle_node_is_drained_and_deleted_without_jobs():
    idle = {"n1": NOW - 700}
    assert acts(view([machine("n1")], [PoolNode("n1", "free")], idle=idle)) == [("drain", "n1")]
    drained = PoolNode("n1", "draining", "vtorque-pool: idle")
    assert acts(view([machine("n1")], [drained])) == [("leave", "n1")]
    with_job = dataclasses.replace(drained, jobs=("1.server",))
    assert acts(view([machine("n1")], [with_job])) == []


def test_node_drained_by_an_admin_is_kept():
    assert acts(view([machine("n1")], [PoolNode("n1", "draining", "bad fan")])) == []


def test_drained_node_with_a_job_is_undrained_for_waiting_jobs():
    drained = PoolNode("n1", "draining", "vtorque-pool: idle", ("1.server",))
    assert acts(view([machine("n1")], [drained], jobs(1)))[0] == ("undrain", "n1")


def test_node_drained_by_an_admin_command_is_not_undrained():
    drained = PoolNode("n1", "draining", "vtorque-pool: drained by an administrator", ("1.server",))
    assert ("undrain", "n1") not in acts(view([machine("n1")], [drained], jobs(1)))


def test_machine_that_never_gets_up_is_ended_after_its_timeout():
    down = [PoolNode("n1", "unusable")]
    assert acts(view([machine("n1", age=800)], down)) == []
    assert acts(view([machine("n1", age=1000)], down, down=200.0)) == [("fail", "n1")]


def test_restarted_server_with_all_nodes_down_ends_none():
    nodes, machines = [PoolNode("n1", "unusable")], [machine("n1", age=9000)]
    assert acts(view(machines, nodes, seen={"m-n1"})) == []


def test_machine_that_ended_before_it_was_up_is_a_failed_start():
    """Otherwise a machine that powers off at its boot would be made again each round."""
    ended = [machine("n1", state="ended")]
    assert acts(view(ended)) == [("end", "n1"), ("fail", "n1")]
    assert acts(view(ended, seen={"m-n1"})) == [("end", "n1")]
    assert acts(view([*ended, machine("n1", name="new")], [PoolNode("n1", "free")])) == [
        ("end", "n1")
    ]


def test_machine_that_was_up_once_is_not_a_failed_start():
    """A user's job can shut its worker down: the shape stays available to others."""
    found = view([machine("n1", age=9000)], [PoolNode("n1", "unusable")], seen={"m-n1"}, down=200.0)
    assert acts(found) == [("leave", "n1")]


def test_node_of_a_missing_machine_is_deleted_and_its_job_requeued():
    nodes = [PoolNode("n1", "unusable", "", ("7.server",))]
    assert acts(view([], nodes)) == [("requeue", "n1"), ("leave", "n1")]


def test_silent_cloud_changes_nothing():
    nodes = [PoolNode("n1", "unusable", "", ("7.server",)), PoolNode("n2", "free")]
    found = view([], nodes, jobs(9), silent={"here": "no answer"}, idle={"n2": 0.0})
    assert acts(found) == []


def test_machines_without_nodes_are_added_and_unknown_machines_ended():
    machines = [
        machine("n1"),
        machine("other"),
        machine("n2", name="b"),
        machine("n2", 90, name="a"),
    ]
    found = steps(view(machines, [PoolNode("n2", "busy", "", ("1",))]))
    assert [(s.kind, s.node, s.machine.id if s.machine else "") for s in found] == [
        ("end", "other", "m-other"),
        ("end", "n2", "b"),
        ("join", "n1", "m-n1"),
    ]


def test_held_node_is_skipped():
    nodes, machines = [PoolNode("n1", "unusable")], [machine("n1", 9000)]
    assert acts(view(machines, nodes, held={"n1": "a look"})) == []


def test_paused_shape_starts_nothing():
    assert acts(view(waiting=jobs(3), paused=frozenset({"small"}))) == []


def test_machine_in_deletion_is_not_started_again():
    assert acts(view([machine("n1", state="deleting")], [], jobs(1))) == [("start", "n2")]
