"""Values of samples, compared with libvirt and the kernel."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import measured
import running_journal
from vtorque_core.api import JobAttempt
from vtorque_core.live.jobs import RunningJobs
from vtorque_telemetry import figures, samples
from vtorque_telemetry.figures import GuestMeter
from vtorque_telemetry.labels import Labels
from vtorque_telemetry.metrics import METRICS
from vtorque_telemetry.threads import QemuProcess

pytestmark = pytest.mark.e2e

BUSY = """
import ctypes, threading, time
def spin():
    ctypes.CDLL(None).prctl(15, b"IO iothread1", 0, 0, 0)
    end = time.thread_time() + 0.4
    while time.thread_time() < end: pass
    print("spun", flush=True)
    time.sleep(99)
threading.Thread(target=spin).start()
time.sleep(99)
"""


@pytest.fixture
def job(tmp_path):
    return running_journal.JournalledJob(running_journal.paths_below(tmp_path), ranks=3)


@pytest.fixture
def running_job(job):
    (found,) = RunningJobs(job.paths).jobs()
    return found


def test_running_jobs_are_read_with_owner_guests_and_phases(job, running_job):
    (guest,) = running_job.guests
    assert running_job.job == JobAttempt("42.srv", 0, "ada", os.geteuid(), "n1")
    assert (guest.index, guest.rank, guest.vcpus, guest.ram_mib) == (0, 3, 1, 256)
    assert (guest.name, guest.uuid) == (job.names[0], job.uuids[0])
    assert guest.ready > guest.started - 0.001  # kept in whole milliseconds
    now = running_job.phases[-1][1] + 5
    spans = samples._spans(running_job.phases, now)
    assert list(spans) == ["plan", "boot", "run"]
    assert spans["run"] == pytest.approx(5)
    assert running_job.kept.directory == job.kept.directory


def test_only_changed_journals_are_read_again(job, monkeypatch):
    running = RunningJobs(job.paths)
    first = running.jobs()
    monkeypatch.setattr(RunningJobs, "_read", lambda *_: pytest.fail("read again"))
    assert running.jobs() == first
    monkeypatch.undo()
    job.journal.phase("done")
    assert running.jobs()[0].phases[-1][0] == "done"
    job.end()
    assert running.jobs() == []


@pytest.mark.parametrize("content", [b"", b"{", b'{"op":"job"}\n', b"\xff\xff\n"])
def test_unreadable_journal_hides_no_other_job(job, content):
    (job.paths.journal / "13.srv.0.jsonl").write_bytes(content)
    assert [found.job.id for found in RunningJobs(job.paths).jobs()] == ["42.srv"]


def test_broken_facts_hide_no_other_job(job):
    job.kept.add_facts(guests=[{"domain": job.names[0], "rank": "first"}])
    good = running_journal.JournalledJob(job.paths, "43.srv")
    assert [found.job.id for found in RunningJobs(job.paths).jobs()] == ["43.srv"]
    job.kept.add_facts(guests="none", node=None)
    (broken, _) = RunningJobs(job.paths).jobs()
    assert (broken.guests[0].rank, broken.guests[0].vcpus) == (0, 0)
    good.end()


def test_libvirt_counters_are_read(running_job):
    meter = GuestMeter(running_job.guests[0])
    values = {
        name + str(dict(own) or ""): v
        for (name, own), v in meter.measure(measured.domstats()).items()
    }
    g = "vtorque_guest_"
    assert values[f"{g}cpu_seconds_total"] == pytest.approx(1.02)
    assert values[f"{g}cpu_steal_seconds_total"] == pytest.approx(6.056497553)
    assert values[f"{g}disk_read_bytes_total{{'device': 'vda'}}"] == 114426368
    assert values[f"{g}disk_read_seconds_total{{'device': 'vda'}}"] == pytest.approx(4.011505675)
    assert values[f"{g}network_transmit_drops_total{{'device': 'nic0'}}"] == 2
    assert values[f"{g}network_receive_bytes_total{{'device': 'nic0'}}"] == 90
    assert values[f"{g}memory_assigned_bytes"] == 256 << 20
    assert not [name for name in values if "rss" in name]  # no such process
    assert {name.partition("{")[0] for name in values} <= METRICS.keys()


def test_counter_never_falls_and_missing_values_are_omitted(running_job):
    meter = GuestMeter(running_job.guests[0])
    key = ("vtorque_guest_cpu_seconds_total", ())
    assert meter.measure(measured.domstats(5 * 10**9))[key] == pytest.approx(6.02)
    assert meter.measure(measured.domstats())[key] == pytest.approx(6.02)
    assert key not in meter.measure(None)
    for broken in (
        {"vcpu.maximum": "x"},
        {"block.count": None},
        {"vcpu.maximum": 1, "vcpu.0.time": "1"},
    ):
        assert key not in meter.measure(broken)


def test_number_of_devices_per_guest_is_limited(running_job):
    stats = {"block.count": 10**6, **{f"block.{n}.rd.bytes": n for n in range(100)}}
    found = GuestMeter(running_job.guests[0]).measure(stats)
    assert sum(name.endswith("read_bytes_total") for name, _ in found) == figures.MAX_DEVICES


def test_threads_memory_and_faults_of_the_process_are_read(tmp_path):
    child = subprocess.Popen([sys.executable, "-I", "-c", BUSY], stdout=subprocess.PIPE)
    try:
        assert child.stdout.readline() == b"spun\n"
        process = QemuProcess(Path(f"/proc/{child.pid}"))
        used = process.usage()
        assert used.iothreads == pytest.approx(0.4, rel=0.1)
        fields = Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()
        ticks = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        assert used.process + used.iothreads == pytest.approx(ticks, abs=0.05)
        status = Path(f"/proc/{child.pid}/status").read_text()
        rss = int(status.partition("VmRSS:")[2].split()[0]) << 10
        assert used.rss == pytest.approx(rss, rel=0.1)
        assert used.minor > 100
    finally:
        child.kill()
        child.wait()
    with pytest.raises((OSError, IndexError)):
        process.usage()
    process.close()
    child.stdout.close()


def test_time_of_an_ended_thread_is_kept(tmp_path):
    script = BUSY.replace("print(", "return print(")
    child = subprocess.Popen([sys.executable, "-I", "-c", script], stdout=subprocess.PIPE)
    process = QemuProcess(Path(f"/proc/{child.pid}"))
    try:
        end, most = time.monotonic() + 20, 0.0
        while time.monotonic() < end and most < 0.2:
            process._looks = 0
            most = max(most, process.usage().iothreads)
        child.stdout.readline()
        time.sleep(0.1)
        assert process.usage().iothreads >= most >= 0.2
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
        process.close()


def test_labels_of_the_plugin_come_first_and_are_escaped():
    labels = Labels({"job": "42.srv", "user": "ada", "node": "n1", "guest": "3"})
    series = labels.series("vtorque_app_x", (("job", "forged"), ("step", 'a"b\\\n\x1b[31m')))
    assert series.labels == {
        "job": "42.srv", "user": "ada", "node": "n1", "guest": "3", "step": 'a"b\\??[31m',
    }  # fmt: skip
    assert series.text == 'vtorque_app_x{job="forged",step="a\\"b\\\\??[31m"}'
    assert (
        labels.series("vtorque_app_x", (("job", "forged"), ("step", 'a"b\\\n\x1b[31m'))) is series
    )
