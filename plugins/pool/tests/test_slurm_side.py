"""Output and commands of Slurm, and edits of slurm.conf, with doubles of the commands."""

import dataclasses
import os
import time

import pytest

from directory_cloud import DirectoryDriver
from recorded_command import RecordedCommand
from vtorque_admin.steps import Check
from vtorque_core.api import take_lock
from vtorque_core.api.setup_steps import Installation
from vtorque_pool import on_slurm, slurm_conf
from vtorque_pool.machines import Machines
from vtorque_pool.settings import MachineShape, Settings
from vtorque_pool.slurm import PoolNode, Slurm, _state

LINE = (
    "NodeName={name} Arch=x86_64 CPUTot=1 State={state} ThreadsPerCore=1 "
    "SlurmdStartTime=2026-11-23T16:00:00 LastBusyTime=2026-11-23T16:01:00 "
    "Reason={reason} [root@2026-11-23T16:02:00]\n"
)


class SlurmSite:
    def __init__(self, top):
        self.bin = top / "bin"
        self.scontrol = RecordedCommand(self.bin / "scontrol")
        self.squeue = RecordedCommand(self.bin / "squeue")
        self.cloud = top / "cloud"
        self.cloud.mkdir()
        self.conf = top / "slurm.conf"
        self.conf.write_text("ClusterName=x\nNodeName=n[1-3] CPUs=2\n")
        shape = MachineShape("small", "cloud[1-3]", "here", min_nodes=1, features=("vtorque",))
        self.settings = Settings(
            "test", (shape,), {"here": {"driver": "double"}}, state=str(top / "state"),
            log=str(top / "log"), slurm_conf=str(self.conf), bindir=str(self.bin), max_failures=2,
        )  # fmt: skip
        self.driver = DirectoryDriver(self.cloud)
        self.said = []
        self.machines = Machines(self.settings, {"here": self.driver}, self.said.append)
        self.slurm = Slurm(self.settings)

    def say(self, **states):
        text = "".join(
            LINE.format(name=name, state=state, reason=reason)
            for name, (state, reason) in states.items()
        )
        self.scontrol.say(text.encode())

    def updates(self):
        return [line for line in self.scontrol.calls() if " show " not in line]


@pytest.fixture
def site(tmp_path):
    return SlurmSite(tmp_path)


@pytest.mark.parametrize(
    ("flags", "state"),
    [
        ("IDLE+CLOUD", "free"),
        ("ALLOCATED+CLOUD", "busy"),
        ("IDLE+CLOUD+POWERED_DOWN", "off"),
        ("ALLOCATED+CLOUD+POWERING_UP", "building"),
        ("IDLE+CLOUD+POWERING_DOWN", "deleting"),
        ("DOWN+CLOUD+POWERED_DOWN", "unusable"),
        ("IDLE+CLOUD+DRAIN", "draining"),
    ],
)
def test_node_states_follow_from_slurm_flags(flags, state):
    assert _state(set(flags.split("+"))) == state


def test_nodes_have_reason_times_and_jobs(site):
    site.say(cloud1=("ALLOCATED+CLOUD", "a fan is bad"), n1=("IDLE", "x"))
    site.squeue.say(b"7 cloud[1-2]\n8_1 cloud1\n9 \n")
    nodes = site.slurm.nodes()
    assert set(nodes) == {"cloud1"}
    assert nodes["cloud1"].jobs == ("7", "8_1")
    assert nodes["cloud1"].reason == "a fan is bad"
    assert nodes["cloud1"].idle_since - nodes["cloud1"].since == 60


def test_failed_start_sets_the_node_down_and_off_to_requeue_its_job(site):
    (site.cloud / "full").touch()
    assert on_slurm.resume(site.machines, site.slurm, ["cloud1"]) == 1
    assert site.updates() == [
        "update nodename=cloud1 state=DOWN reason=vtorque-pool: full",
        "update nodename=cloud1 state=POWER_DOWN",
    ]


def test_second_failure_reserves_nodes_that_are_off(site):
    (site.cloud / "full").touch()
    on_slurm.resume(site.machines, site.slurm, ["cloud1"])
    site.updates()
    site.say(cloud3=("IDLE+CLOUD", ""))
    on_slurm.resume(site.machines, site.slurm, ["cloud1"])
    made = next(line for line in site.updates() if line.startswith("create reservation"))
    assert " nodes=cloud1,cloud2 " in made
    assert "duration=30" in made


def test_node_created_by_another_process_is_not_a_failure(site):
    site.settings = dataclasses.replace(site.settings, timeout=0.1, max_failures=1)
    site.machines = Machines(site.settings, {"here": site.driver}, site.said.append)
    lock = take_lock(site.machines.memory.directory / "nodes" / "cloud1", 0)
    try:
        assert on_slurm.resume(site.machines, site.slurm, ["cloud1", "cloud2"]) == 0
    finally:
        os.close(lock)
    assert site.updates() == []
    assert site.machines.memory.read().failed == {}
    assert [m.node for m in site.driver.machines("test")] == ["cloud2"]


def test_address_of_a_machine_is_set(site, monkeypatch):
    make = site.driver.create
    told = lambda order: dataclasses.replace(make(order), address="10.1.1.1")  # noqa: E731
    monkeypatch.setattr(site.driver, "create", told)
    monkeypatch.setattr(
        site.driver,
        "machines",
        lambda cluster: [
            dataclasses.replace(m, address="10.1.1.1")
            for m in DirectoryDriver.machines(site.driver, cluster)
        ],
    )
    assert on_slurm.resume(site.machines, site.slurm, ["cloud1"]) == 0
    assert site.updates() == ["update nodename=cloud1 nodeaddr=10.1.1.1"]


def make_old(site, *nodes):
    for node in nodes:
        site.driver.create(site.machines._order(site.settings.shapes[0], node))
    for path in site.cloud.glob("m-*.json"):
        path.write_text(path.read_text().replace(f"{time.time():.0f}"[:6], "100000"))


def test_tidy_ends_unknown_machines_and_creates_missing_ones(site):
    make_old(site, "cloud1", "stranger")
    site.say(cloud1=("IDLE+CLOUD+POWERED_DOWN", ""), cloud2=("ALLOCATED+CLOUD+POWERING_UP", ""))
    assert on_slurm.tidy(site.machines, site.slurm) == 3
    assert [m.node for m in site.driver.machines("test")] == ["cloud2"]


def test_tidy_powers_down_nodes_that_timed_out_or_lost_their_machine(site):
    site.say(
        cloud1=("DOWN+CLOUD+POWERED_DOWN", "ResumeTimeout reached"),
        cloud2=("DOWN+CLOUD+NOT_RESPONDING", "Not responding"),
    )
    assert on_slurm.tidy(site.machines, site.slurm) == 2
    done = [line for line in site.updates() if "POWER_DOWN" in line]
    assert done == [f"update nodename=cloud{n} state=POWER_DOWN" for n in (1, 2)]


@pytest.mark.parametrize(("before", "now"), [("off", "building"), ("unusable", "busy")])
def test_tidy_keeps_a_machine_whose_node_was_resumed_in_between(site, monkeypatch, before, now):
    make_old(site, "cloud1")
    answers = iter([PoolNode("cloud1", before, "vtorque-pool: x"), PoolNode("cloud1", now)])
    monkeypatch.setattr(site.slurm, "nodes", lambda: {"cloud1": next(answers)})
    on_slurm.tidy(site.machines, site.slurm)
    assert [m.node for m in site.driver.machines("test")] == ["cloud1"]
    assert site.updates() == []
    assert next(answers, None) is None


def test_tidy_keeps_nodes_set_down_by_an_admin(site):
    site.say(cloud1=("DOWN+CLOUD+POWERED_DOWN", "never again"))
    assert on_slurm.tidy(site.machines, site.slurm) == 0
    assert site.updates() == []


def test_machine_is_ended_while_slurm_is_silent(site):
    site.machines.make(["cloud1"], "test")
    site.scontrol.say(err="Unable to contact slurm controller", code=1)
    assert on_slurm.suspend(site.machines, site.slurm, ["cloud1"]) == 0
    assert site.driver.machines("test") == []


def test_tidy_changes_nothing_of_a_silent_cloud(site):
    (site.cloud / "down").touch()
    site.say(cloud1=("DOWN+CLOUD", "Not responding"), cloud2=("ALLOCATED+CLOUD+POWERING_UP", ""))
    assert on_slurm.tidy(site.machines, site.slurm) == 0
    assert site.updates() == []


# -- slurm.conf -----------------------------------------------------------------------------------


def steps(site, tmp_path):
    place = Installation(tmp_path / "vtorque", tmp_path / "vtorque.toml", tmp_path / "jobshell")
    return slurm_conf.steps(site.settings, place)


def test_other_nodes_of_the_site_are_never_ended(site):
    assert "SuspendExcNodes=cloud[1-3]:1,n[1-3]" in slurm_conf.lines(site.settings, site.conf)


@pytest.mark.root
@pytest.mark.parametrize("end", ["", "\n", "# x", "\\"])
def test_repeated_setup_and_uninstall_restores_slurm_conf(site, tmp_path, end):
    before = site.conf.read_bytes() + end.encode()
    site.conf.write_bytes(before)
    for _ in range(2):
        for step in steps(site, tmp_path):
            if not isinstance(step, Check):
                step.apply()
        assert [step.text for step in steps(site, tmp_path) if not step.is_applied()] == []
        assert b"\ninclude vtorque-pool.conf" in site.conf.read_bytes()
        text = (tmp_path / "vtorque-pool.conf").read_text()
        assert "NodeName=cloud[1-3] State=CLOUD CPUs=1 RealMemory=2048 Feature=vtorque" in text
        for step in reversed(steps(site, tmp_path)):
            step.undo()
        assert site.conf.read_bytes() == before
        assert not (tmp_path / "vtorque-pool.conf").exists()


def test_settings_of_the_site_are_never_overridden(site, tmp_path):
    with site.conf.open("a") as conf:
        conf.write("SlurmctldParameters=idle_on_node_suspend,x\nPrivateData=jobs\n")
        conf.write("resumeprogram=/site/resume\nReturnToService=1\n")
    problems = [s.problem for s in steps(site, tmp_path) if isinstance(s, Check) and s.problem]
    assert len(problems) == 2
    assert "add cloud to PrivateData=jobs" in problems[0]
    assert "/site/resume" in problems[1]
    lines = slurm_conf.lines(site.settings, site.conf)
    assert not any(line.startswith(("SlurmctldParameters", "ReturnToService")) for line in lines)
