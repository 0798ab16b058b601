"""The sampler of a node: cost, lifetime, faults."""

import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import halves
import measured
import running_journal
from counting import calls
from vtorque_core.api import HostFault, kept_records
from vtorque_core.config import plugins
from vtorque_core.live import extensions
from vtorque_telemetry import app, influx, node, sampler, series, unprivileged_sampler
from vtorque_telemetry.api import GROUP
from vtorque_telemetry.process import CHANNEL, Sampler, last_sample
from vtorque_telemetry.settings import Settings
from vtorque_telemetry.threads import QemuProcess
from vtorque_testing.harness import PluginSite

pytestmark = pytest.mark.e2e


@pytest.fixture
def paths(tmp_path):
    return running_journal.paths_below(tmp_path)


class Taken:
    """An outlet that records its input."""

    def __init__(self):
        self.samples, self.ended = [], set()

    def give(self, samples, ended):
        self.samples.append(samples)
        self.ended |= set(ended)


class Stats:
    """A double of libvirt: recorded counters that grow."""

    def __init__(self, uuids):
        self.uuids, self.calls = uuids, 0

    def __call__(self, _uri):
        self.calls += 1
        return {uuid: measured.domstats(self.calls * 10**6) for uuid in self.uuids}


def lines(job):
    return [json.loads(line) for line in job.kept.read(series.NAME).splitlines()]


def test_all_jobs_are_sampled_in_one_call_and_ended_ones_removed(paths):
    jobs = [running_journal.JournalledJob(paths, f"{n}.srv", guests=2) for n in range(3)]
    stats, taken = Stats([u for job in jobs for u in job.uuids]), Taken()
    loop = halves.loop(paths, [taken], stats)
    loop.tick()
    assert stats.calls == 1
    assert {s.labels["job"] for s in taken.samples[0]} == {"0.srv", "1.srv", "2.srv"}
    cpu = [s for s in taken.samples[0] if s.name == "vtorque_guest_cpu_seconds_total"]
    assert sorted((s.labels["job"], s.labels["guest"]) for s in cpu) == [
        (job.id, str(g)) for job in jobs for g in range(2)
    ]
    assert {tuple(sorted(s.labels)) for s in cpu} == {("guest", "job", "node", "user")}
    jobs[1].end()
    loop.tick()
    assert taken.ended == {"1.srv"}
    assert {s.labels["job"] for s in taken.samples[1]} == {"0.srv", "2.srv"}
    phases = {s.labels["phase"]: s.value for s in taken.samples[1] if "phase_s" in s.name}
    assert phases.keys() == {"plan", "boot", "run"}
    head, *rest = lines(jobs[0])
    assert (head["job"], head["node"]) == ("0.srv", "n1")
    assert sum("vtorque_guest_cpu_seconds_total" in line["v"] for line in rest) >= 2
    assert 'vtorque_job_phase_seconds{phase="boot"}' in next(x for x in rest if x["g"] is None)["v"]


def test_migrations_and_pauses_are_counted(paths):
    job = running_journal.JournalledJob(paths)
    taken = Taken()
    loop = halves.loop(paths, [taken], Stats(job.uuids))
    loop.tick()
    for phase in ("arrives", "run", "paused", "run", "paused", "moves"):
        job.journal.phase(phase)
    loop.tick()
    first, last = (
        {s.labels["phase"]: s.value for s in each if s.name == "vtorque_job_phases_total"}
        for each in taken.samples
    )
    assert first == dict.fromkeys(("arrives", "paused", "suspended", "moves"), 0)
    assert last == {"arrives": 1, "paused": 2, "suspended": 0, "moves": 1}


def test_paused_guests_have_no_samples_and_a_phase(paths):
    job = running_journal.JournalledJob(paths)
    taken = Taken()
    loop = halves.loop(paths, [taken], Stats(job.uuids))
    for phase in ("paused", "suspended", "run"):
        job.journal.phase(phase)
        loop.tick()
    guests = [sum(s.name.startswith("vtorque_guest_") for s in each) for each in taken.samples]
    assert guests[:2] == [0, 0] and guests[2] > 0
    assert taken.ended == set()
    phases = {s.labels["phase"] for s in taken.samples[1] if "phase" in s.name}
    assert "suspended" in phases


def test_hanging_libvirt_is_reported_once_and_phases_are_sampled(paths, caplog):
    running_journal.JournalledJob(paths)
    taken = Taken()

    def hang(_uri):
        raise HostFault("no answer from libvirtd within 1 s")

    loop = halves.loop(paths, [taken], hang)
    for _ in range(3):
        loop.tick()
    assert [r.message for r in caplog.records] == ["no answer from libvirtd within 1 s"]
    assert all(any("phase" in s.name for s in samples) for samples in taken.samples)


def test_full_disk_or_defect_of_one_job_does_not_affect_others(paths, caplog, monkeypatch):
    bad = running_journal.JournalledJob(paths, "1.srv")
    good = running_journal.JournalledJob(paths, "2.srv")
    taken, real = Taken(), kept_records.Place.append

    def full(self, name):
        if self.key.startswith("1.srv"):
            raise OSError(28, "No space left on device")
        return real(self, name)

    monkeypatch.setattr(kept_records.Place, "append", full)
    loop = halves.loop(paths, [taken], Stats(bad.uuids + good.uuids))
    loop.tick()
    assert "No space left" in caplog.text
    assert {s.labels["job"] for s in taken.samples[0]} == {"1.srv", "2.srv"}
    monkeypatch.setattr(loop.jobs["1.srv.0"], "measure", None)
    for _ in range(3):
        loop.tick()
    assert {s.labels["job"] for s in taken.samples[1]} == {"2.srv"}
    assert caplog.text.count("Traceback") == 1


def serve_port(job, text):
    """Act as QEMU's end of a guest's port: send the text to each client."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(job.run_dir() / CHANNEL))
    listener.listen(1)

    def speak():
        port, _ = listener.accept()
        port.sendall(text)
        time.sleep(0.1)
        port.close()
        listener.close()

    thread = threading.Thread(target=speak)
    thread.start()
    return thread


def test_metrics_of_a_job_get_its_labels(paths, monkeypatch):
    job, taken = running_journal.JournalledJob(paths), Taken()
    thread = serve_port(job, b"loss 0.5 fold=1\nloss 0.4 fold=1\nbad line here\n" + b"x 1\n" * 3)
    loop = halves.loop(paths, [taken], Stats(job.uuids), settings=Settings(app_series=1))
    end = time.monotonic() + 20
    own = []
    while not own and time.monotonic() < end:
        loop.tick()
        own = [s for s in taken.samples[-1] if s.name.startswith("vtorque_app_")]
    thread.join(180)
    assert [(s.name, s.value) for s in own] == [("vtorque_app_loss", 0.4)]
    assert own[0].labels == {
        "job": "42.srv",
        "user": "ada",
        "node": "n1",
        "guest": "0",
        "fold": "1",
    }
    loop.tick()
    (told,) = [s.value for s in taken.samples[-1] if s.name.endswith("rejected_total")]
    assert told == 4  # the invalid line, and three of one series above the limit
    loop.tick(last=job.key)
    said = [x["v"] for x in lines(job)[1:] if 'vtorque_app_loss{fold="1"}' in x["v"]]
    assert len(said) == 1


def test_many_metrics_of_one_job_do_not_displace_other_samples(paths, monkeypatch):
    """Otherwise the job's file would be thinned until other guests have no samples."""
    job = running_journal.JournalledJob(paths, guests=2)
    said, first = iter(range(10**6)), []

    def read(self, _room):
        first.append(self)
        mine = self is first[0]
        return {("vtorque_app_x", (("n", str(next(said) % 3)),)): 1.0} if mine else {}

    clock = iter(range(1000, 10**9, 2))
    monkeypatch.setattr(app.AppMeter, "read", read)
    monkeypatch.setattr(sampler.time, "time", lambda: float(next(clock)))
    monkeypatch.setattr(series, "MAX_LINES", 20)
    loop = halves.loop(paths, [], Stats(job.uuids))
    for _ in range(400):
        loop.tick()
    for guest in (0, 1):
        mine = [x for x in lines(job)[1:] if x["g"] == guest]
        assert 10 <= len(mine) <= 20, guest
        assert (sum("vtorque_app_x" in str(x["v"]) for x in mine) == len(mine)) is (guest == 0)
    assert lines(job)[0]["interval"] <= 128


def test_full_disk_is_reported_once(paths, caplog, monkeypatch):
    job = running_journal.JournalledJob(paths)
    full = OSError(28, "No space left on device")
    monkeypatch.setattr(series.SeriesFile, "add", lambda *_: (_ for _ in ()).throw(full))
    loop = halves.loop(paths, [], Stats(job.uuids))
    for _ in range(5):
        loop.tick()
    monkeypatch.undo()
    assert [r.message for r in caplog.records] == ["42.srv: [Errno 28] No space left on device"]


def test_cost_of_a_sample_of_fifty_guests_is_bounded(paths):
    """The cost in seconds: bench/run.py."""
    jobs = [running_journal.JournalledJob(paths, f"{n}.srv") for n in range(50)]
    taken = Taken()
    loop = halves.loop(paths, [taken], Stats([u for job in jobs for u in job.uuids]))
    loop.tick()
    for meter in loop.jobs.values():
        for guest, _ in meter._guests.values():  # a real process stands for each QEMU
            guest._process = QemuProcess(Path(f"/proc/{os.getpid()}"))
    loop.tick()
    before = resource.getrusage(resource.RUSAGE_SELF)
    recorded = Stats([u for job in jobs for u in job.uuids])("")
    loop._stats = lambda _uri: recorded

    def sample():
        loop.tick()  # with an exporter that writes each sample: Prometheus scrapes less often
        influx.lines(taken.samples[-1])

    for _ in range(3):
        assert calls(sample) < 50 * 6000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before.ru_maxrss < 50_000


MANY = """
import ctypes, gc, sys
from pathlib import Path
import halves, measured, running_journal
from vtorque_telemetry import sampler
paths = running_journal.paths_below(Path(sys.argv[1]))
job = running_journal.JournalledJob(paths)
loop = halves.loop(paths, [], lambda _: {job.uuids[0]: measured.domstats()})
loop.tick()
many = int(sys.argv[2])
for n in range(many + 1):
    stats = {job.uuids[0]: measured.domstats(n)}
    loop._stats = lambda _: stats
    sampler.time.time = lambda: 2e9 + 2 * n
    loop.tick()
    if n % (many // 2) == 0:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what is free is no leak, whenever a file was thinned
        print(Path("/proc/self/statm").read_text().split()[1], flush=True)
"""


@pytest.mark.full
@pytest.mark.parametrize("many", [10_000])
def test_memory_is_flat_over_many_samples(tmp_path, many):
    """Pages of the process after none, half and all samples; the file was thinned before half."""
    assert many // 2 > series.MAX_LINES
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    argv = [sys.executable, "-c", MANY, str(tmp_path / "n"), str(many)]
    done = subprocess.run(argv, capture_output=True, check=True, timeout=120, env=environ)
    _, half, whole = (int(line) * 4096 for line in done.stdout.split())
    assert whole - half < 1 << 20, done.stdout
    (file,) = tmp_path.rglob(series.NAME)
    assert len(file.read_bytes().splitlines()) <= series.MAX_LINES + 10


# -- The process -----------------------------------------------------------------------------------


@pytest.fixture
def process(paths, tmp_path):
    """Return the resource; its process is ended afterwards, with any result of the test."""
    config = tmp_path / "vtorque.toml"
    config.write_text("[plugin.telemetry]\ninterval = 0.5\n")
    found = Sampler.for_node(paths, config)
    yield found
    found.release()
    assert found.is_lost()


def pid_of(process):
    with Path(process.lock).open("rb+") as lock:
        return process._holder(lock.fileno())


def eventually(condition, seconds=120):
    end = time.monotonic() + seconds
    while not (value := condition()) and time.monotonic() < end:
        time.sleep(0.02)
    assert value
    return value


def test_sampler_is_started_killed_and_restarted(paths, process):
    job = running_journal.JournalledJob(paths)
    process.create()
    eventually((job.kept.directory / series.NAME).exists)
    eventually(lambda: len(lines(job)) > 3)
    assert os.getpriority(os.PRIO_PROCESS, pid_of(process)) == 10
    os.kill(pid_of(process), signal.SIGKILL)
    eventually(process.is_lost)
    process.release()
    assert list(paths.run.glob("telemetry*")) == []
    before = len(lines(job))
    process.create()
    assert not process.is_lost()
    eventually(lambda: len(lines(job)) > before + 1)
    assert all("t" in line for line in lines(job)[1:])
    assert (paths.state / "telemetry.log").stat().st_mode & 0o077 == 0
    process.release()
    assert process.is_lost()
    assert not (paths.run / "telemetry.sock").exists()
    process.release()


def test_ending_job_gets_a_last_sample_without_waiting(paths, process):
    job = running_journal.JournalledJob(paths)
    last_sample(paths, job.key)  # no sampler runs
    process.create()
    eventually((paths.run / "telemetry.sock").exists)
    eventually((job.kept.directory / series.NAME).exists)
    eventually(lambda: len(lines(job)) > 1)

    def whole():
        return [x["v"] for x in lines(job)[1:] if x["g"] is None]

    eventually(lambda: len(whole()) == 1)  # of completed phases
    last_sample(paths, job.key)
    eventually(lambda: len(whole()) == 2)
    assert 'vtorque_job_phase_seconds{phase="run"}' in whole()[-1]
    assert (paths.run / "telemetry.sock").stat().st_mode & 0o077 == 0
    last_sample(paths, "no such job")
    os.kill(pid_of(process), signal.SIGSTOP)
    last_sample(paths, job.key)  # although it does not answer
    os.kill(pid_of(process), signal.SIGCONT)


def test_start_of_the_sampler_does_not_wait_for_its_first_line(process, tmp_path):
    """create() returns before the sampler's Python has started; the sampler has low priority."""
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\nexec sleep 1000\n")
    slow.chmod(0o755)
    replace(process, argv=(str(slow), *process.argv[1:])).create()
    assert os.getpriority(os.PRIO_PROCESS, pid_of(process)) == 10


def test_sampler_is_started_before_the_boot(paths, tmp_path):
    acquired = []
    site = PluginSite(paths, (Settings(),), tmp_path / "v.toml")
    job = SimpleNamespace(site=site, acquire=acquired.append)
    node.vtorque_while_booting(job)
    assert [r.kind for r in acquired] == ["telemetry-sampler"]
    assert acquired[0].scope == "node"
    node.vtorque_while_booting(
        SimpleNamespace(site=PluginSite(paths, (Settings(enabled=False),)), acquire=None)
    )


def test_sampler_that_cannot_start_is_a_warning(paths, tmp_path):
    told = []
    site = PluginSite(paths, (Settings(),), tmp_path / "v.toml")
    paths.run.rmdir()
    job = SimpleNamespace(site=site, acquire=lambda resource: resource.create(), warn=told.append)
    node.vtorque_while_booting(job)
    assert len(told) == 1
    assert "is not measured" in told[0]
    assert "No such file" in told[0]


@pytest.mark.parametrize(
    ("settings", "status"),
    [
        ({"exporters": ()}, []),
        ({}, ["ok"]),
        ({"listen": "127.0.0.1:9177"}, ["warning"]),
        ({"exporters": ("influxdb", "prometheus")}, ["warning", "ok"]),
        ({"exporters": ("influxdb",), "influx_url": "https://i:8086/write?db=v"}, []),
        ({"listen": "[::1]:9177"}, ["warning"]),
        ({"listen": "0.0.0.0:9177", "certificate": "/c", "key": "/k"}, ["ok"]),
    ],
)
def test_doctor_reports_unprotected_exporters(paths, settings, status):
    found = Settings(**{"exporters": ("prometheus",), "token": "/t", **settings})
    (asked,) = node.vtorque_health_checks()
    assert [r.status for r in asked.check(PluginSite(paths, (found,)))] == status


# -- Exporters of other authors --------------------------------------------------------------------


def test_exporters_are_found_by_name_and_a_broken_one_is_reported(monkeypatch, tmp_path, caplog):
    sinks = tmp_path / "acme_sinks.py"
    sinks.write_text("def good(site):\n    raise OSError('no card')\n\nodd = 3\n")
    info = tmp_path / "acme-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: acme\nVersion: 1\n")
    names = {"acme": "acme_sinks:good", "odd": "acme_sinks:odd", "gone": "acme_sinks:gone"}
    lines = "".join(f"{name} = {where}\n" for name, where in names.items())
    (info / "entry_points.txt").write_text(f"[vtorque1.telemetry]\n{lines}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(plugins, "require_trusted", lambda *_: None)  # pytest's directory
    config = tmp_path / "v.toml"
    wanted = ["acme", "prometheus", "nowhere", "odd", "gone", "acme"]
    config.write_text(f"[plugin.telemetry]\nexporters = {json.dumps(wanted)}\n")
    settings, sinks = unprivileged_sampler._openings(config)
    assert [*sinks] == ["acme", "prometheus"] and settings.interval == 2.0
    for said in (
        "exporter nowhere: no installed distribution provides 'nowhere' in vtorque1.telemetry; "
        "available: acme, gone, influxdb, odd, prometheus, textfile",
        "exporter odd: 'odd' of acme 1 is not a function",
        "exporter gone: module 'acme_sinks' has no attribute 'gone'",
    ):
        assert said in caplog.text


def test_telemetry_loads_without_other_plugins_and_can_be_disabled(tmp_path):
    config = tmp_path / "v.toml"
    config.write_text('[plugins]\nenable = ["telemetry"]\n')
    site, found = extensions.load(config, GROUP)
    assert site[Settings].interval == 2.0
    assert sorted(p.name for p in found.found) == ["influxdb", "prometheus", "textfile"]
    config.write_text('[plugins]\ndisable = ["telemetry"]\n')
    assert extensions.load(config, GROUP)[1].found == ()


def test_sampler_processes_import_no_other_acting_module(tmp_path):
    """The processes start while guests boot, and would import nearly all of vTorque."""
    config = tmp_path / "vtorque.toml"
    config.touch()
    code = f"""
import sys
from pathlib import Path
from vtorque_core.live import extensions
extensions.load(Path({str(config)!r}), {GROUP!r})
print(*sys.modules)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    acting = {each for each in run.stdout.split() if each.endswith(".node")} - {"vtorque_core.node"}
    assert acting == {"vtorque_telemetry.node"}


def test_sampler_needs_only_the_standard_library_and_the_core():
    names = "import sys, vtorque_telemetry.sampler; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", names], capture_output=True, text=True, check=True)
    assert not {"psutil", "requests", "prometheus_client"} & {*run.stdout.split()}


@pytest.mark.parametrize(
    ("supports", "settings", "there"),
    [
        ({"EnvVar", "LinePort"}, {}, True),
        ({"EnvVar"}, {}, False),
        ({"EnvVar", "LinePort"}, {"app_series": 0}, False),
        ({"EnvVar", "LinePort"}, {"enabled": False}, False),
    ],
)
def test_guest_with_support_gets_a_metrics_file(paths, supports, settings, there):
    guest = SimpleNamespace(supports=frozenset(supports), run_dir=paths.run / "g0")
    site = PluginSite(paths, (Settings(**settings),))
    items = list(node.vtorque_guest_context(guest, site))
    channels = list(node.vtorque_render_domain(guest, site))
    assert [type(item).__name__ for item in items] == (["LinePort", "EnvVar"] if there else [])
    assert [(c.path, c.owner) for c in channels] == there * [
        (f"{paths.run}/g0/metrics.sock", "root")
    ]
    assert not there or (items[0].port, items[1].value) == (channels[0].port, items[0].path)


def test_sampler_imports_no_placement_module():
    """The sampler starts together with a job, and its imports take CPU time from the start."""
    code = "import vtorque_telemetry.sampler, sys; print(*sys.modules)"
    argv = [sys.executable, "-I", "-c", code]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=180)
    assert not [name for name in done.stdout.split() if name.startswith("vtorque_core.plan")]
