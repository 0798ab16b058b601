"""Warm guests: real ones, claimed by real jobs, and never twice."""

import contextlib
import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest

import hooks_by_hand
from vtorque_core.plan.placement.node_hardware import topology
from warm_guests import TELLS, kept_warm, took

pytestmark = pytest.mark.e2e

SHAPE = "img=micro vcpus=1 ram=256M"
PROLOGUE = "vtorque hook .*prologue"


@pytest.fixture
def warm(clean, config, request):
    """Keep a guest ready, or as many as the test sets, until its end."""
    with kept_warm(clean, config, SHAPE, getattr(request, "param", 1)) as found:
        yield found


def differ(warm, number):
    """Run this many jobs one after the other; no two may share anything."""
    seen, keys = [], []
    for _ in range(number):
        warm.await_full(1)
        lines, log = warm.job()
        assert int(lines[3]) <= time.time() + 1, lines
        assert len(took(log)) == 1, log
        keys += took(log)
        seen.append(lines)
    for column in list(zip(*seen, strict=True))[:3]:
        assert len(set(column)) == number, column
    assert len(set(keys)) == number
    for lines in seen:
        now, began = int(lines[3]), int(lines[4])
        assert began - 1 <= now  # its clock was stopped before
        assert lines[5:] == seen[0][5:]
    return keys


def test_jobs_get_distinct_warm_guests(warm):
    time.sleep(2)  # its clock is stopped
    keys = differ(warm, 2)
    assert not {path.name for path in (warm.node.state / "journal").iterdir()} & {
        f"{key}.jsonl" for key in keys
    }
    other, log = warm.job("-vm", "ram=300M")  # another size: booted for the job
    assert took(log) == []
    assert other[5:] == [other[5], warm.node.user]


@pytest.mark.full
def test_killed_service_finds_its_guests_and_a_dead_guest_is_replaced(warm):
    before = warm.await_full()
    lock = warm.node.run_dir / "warm.lock"
    inode = f":{lock.stat().st_ino} "
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if inode in (process / "fdinfo/0").read_text():
                os.kill(int(process.name), signal.SIGKILL)
    warm.node.wait_for(lambda: not json.loads(warm.command("--json"))["service"])
    for key in before:  # none of them is alive any more, and no process has checked
        (name,) = (n for n in domains() if key in n)
        os.kill(int(Path(f"/run/libvirt/qemu/{name}.pid").read_text()), signal.SIGKILL)
    _, log = warm.job()  # and starts the service
    assert len(took(log)) == 1
    assert any("booting the image instead" in message for message in log), log
    after = warm.await_full()
    assert not before & after
    assert warm.command("start") == "the service is already running\n"


def output(*argv):
    return subprocess.run(argv, capture_output=True, check=False, text=True).stdout


def domains():
    return output("virsh", "-q", "list", "--name").split()


@pytest.mark.full
def test_job_of_another_size_gets_the_memory_of_warm_guests(warm, config):
    """No warm guest has the job's size, so the job claims none."""
    before = warm.await_full()
    whole = topology("qemu:///system").mem_mib
    config("node", f'host_reserve_ram = "{whole - 1500}M"')  # it has 512 of them
    warm.node.wait_for(lambda: not before & warm.waiting(), what="the new config")
    before = warm.await_full()
    _, log = warm.job("-vm", "ram=900M")
    assert not any("in use by other jobs" in message for message in log), log
    assert not before & warm.waiting()


MEET = """#!/bin/sh
touch met.$PBS_JOBID
while [ "$(ls met.* | wc -l)" -lt 2 ]; do sleep 0.1; done
"""


@pytest.mark.full
@pytest.mark.parametrize("warm", [5], indirect=True)
def test_jobs_that_fill_the_node_start_despite_five_warm_guests(warm, config):
    """Each waits for the other; the node has the memory of these two guests only."""
    before = warm.await_full(5)
    whole = topology("qemu:///system").mem_mib
    config("node", f'host_reserve_ram = "{whole - 3000}M"')  # each job holds 1456 of these
    warm.node.wait_for(lambda: not before & warm.waiting(), what="the new config")
    before = warm.await_full(5)
    jobs = [warm.node.submit(MEET, "-vm", "ram=1200M") for _ in range(2)]
    for job in jobs:
        warm.node.wait_for(lambda job=job: warm.node.state_of(job) in (None, "C"), what=job)
    for path in [warm.node.home / f"met.{job}" for job in jobs]:
        path.unlink()
    for job in jobs:
        (log,) = (warm.node.state / "kept").glob(f"*/{job}.0/log.jsonl")
        assert "in use by other jobs" not in log.read_text()
    assert not before & warm.waiting()


@pytest.mark.full
@pytest.mark.parametrize("warm", [2], indirect=True)
def test_job_of_two_guests_gets_two_warm_guests(warm):
    warm.await_full(2)
    lines, log = warm.job("-vm", "vms_per_node=2")
    assert len(set(took(log))) == 2
    assert lines[5].endswith("-0")


@pytest.mark.full
def test_fifty_jobs_share_no_identity(warm):
    differ(warm, 50)


def kill(node, victim):
    """Kill the process of this name, if any; return whether a job that starts now may fail."""
    if victim == "libvirtd":
        hooks_by_hand.kill_libvirtd()
        hooks_by_hand.start_libvirtd(node)
        return True
    found = output("pgrep", "-f", victim).split()
    if found:
        os.kill(int(found[0]), signal.SIGKILL)
    return bool(found) and victim == PROLOGUE


@pytest.mark.full
@pytest.mark.parametrize("warm", [2], indirect=True)
@pytest.mark.parametrize("seed", [1, 2])
def test_kills_at_any_time_leak_nothing_and_reuse_no_guest(warm, seed):
    """The service, its boots, prologues and libvirtd are killed; each other job runs.

    A prologue's death at each step: tests/unit/node/test_spare_faults.py.
    """
    dice = random.Random(seed)  # noqa: S311
    keys, ran, out = [], 0, warm.node.home / "out"
    for _ in range(100):
        (warm.node.home / "started").touch()
        job = warm.node.submit(TELLS)
        time.sleep(dice.random() * 2)
        victims = ("vtorque_warm.service", "spare_boot", PROLOGUE, "libvirtd")
        may_fail = dice.random() < 0.4 and kill(warm.node, dice.choice(victims))
        warm.node.wait_for(lambda job=job: warm.node.state_of(job) in (None, "C"), what=job)
        for log in (warm.node.state / "kept").glob(f"*/{job}.0/log.jsonl"):
            keys += took([json.loads(line)["message"] for line in log.read_text().splitlines()])
        lines = len(out.read_text().splitlines()) if out.exists() else 0
        assert lines == 7 or may_fail, log
        ran += lines == 7
        out.unlink(missing_ok=True)
    assert len(keys) == len(set(keys))
    assert keys and ran >= 50
