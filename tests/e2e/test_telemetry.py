"""Telemetry of a real guest, in a real Prometheus and a real InfluxDB (Debian's packages)."""

import json
import os
import pwd
import shutil
import socket
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest

import halves
import running_jobs
import running_journal
from monitoring import InfluxDB, Prometheus, free_port
from vtorque_core.base import hypervisor
from vtorque_telemetry.settings import Settings

pytestmark = pytest.mark.e2e

HOST = "10.87.0.1"
OTHER = "vte2e2"  # conftest.py makes this user
SCRIPT = """#!/bin/bash
echo "progress 0.25 phase=warm,fold=1" >>"$VTORQUE_METRICS"
echo "user 1 user=root" >>"$VTORQUE_METRICS"
end=$((SECONDS + 3)); while [ $SECONDS -lt $end ]; do :; done
dd if=/dev/zero of=/data/x bs=1M count=8 2>/dev/null; sync
for i in {{1..2000}}; do printf %01400d 0; done >/dev/udp/{host}/9 2>/dev/null
touch worked
while [ ! -e go ]; do sleep 0.2; done
echo "result 42" >>"$VTORQUE_METRICS"
"""


def domstats(name):
    """Return virsh's statistics of a guest, and the kernel's of its QEMU."""
    text = running_jobs.virsh("domstats", name)
    found = dict(line.strip().split("=", 1) for line in text.splitlines() if "=" in line)
    status = Path("/proc", running_jobs.pid(name), "status").read_text()
    fields = Path("/proc", running_jobs.pid(name), "stat").read_text().rpartition(")")[2].split()
    names = {found[f"block.{n}.name"]: n for n in range(int(found["block.count"]))}
    written = sum(int(found[f"block.{n}.wr.bytes"]) for n in names.values())
    return {
        "vtorque_guest_cpu_seconds_total": int(found["vcpu.0.time"]) / 1e9,
        "sum(vtorque_guest_disk_written_bytes_total)": written,
        "vtorque_guest_network_transmit_bytes_total": int(found["net.0.tx.bytes"]),
        "vtorque_guest_network_receive_bytes_total": int(found["net.0.rx.bytes"]),
        "vtorque_guest_memory_rss_bytes": int(status.partition("VmRSS:")[2].split()[0]) * 1024,
        "vtorque_guest_cpu_seconds_total + vtorque_guest_emulator_cpu_seconds_total": (
            int(fields[11]) + int(fields[12])
        )
        / os.sysconf("SC_CLK_TCK"),
    }


@pytest.fixture
def submit(guest):
    """Submit jobs that are canceled at the test's end if they still run."""
    jobs = []

    def start(*args):
        jobs.append(guest.submit(*args))
        return jobs[-1]

    yield start
    for job in jobs:
        guest.as_user("vmgr", "cancel", job, check=False)


@pytest.fixture
def disk(node):
    path = node.home / "data.raw"
    node.as_user("/usr/bin/truncate", "-s", "32M", str(path))
    node.as_user("/usr/sbin/mke2fs", "-q", "-F", "-t", "ext4", str(path))
    path.chmod(0o640)
    return path


@pytest.fixture
def monitored(guest, config):
    """Give the node exporters, with a Prometheus and an InfluxDB that receive their data."""
    top = Path("/srv/vtorque-e2e-telemetry")
    shutil.rmtree(top, ignore_errors=True)
    top.mkdir(mode=0o755)
    token = top / "token"
    token.write_text("s3cret\n")
    token.chmod(0o600)
    listen = f"127.0.0.1:{free_port()}"
    influx = InfluxDB(top / "influx", "vtorque")
    prometheus = Prometheus(top / "prometheus", listen, token)
    for line in (
        'interval = "1s"', 'write_timeout = "20s"',
        'exporters = ["prometheus", "influxdb", "textfile"]',
        f'listen = "{listen}"', f'token = "{token}"', f'textfile = "{top}/textfile/vtorque.prom"',
        f'influx_url = "{influx.url}/write?db=vtorque"',
    ):  # fmt: skip
        config("plugin.telemetry", line)
    with ExitStack() as stack:
        stack.enter_context(prometheus.run())
        stack.enter_context(influx.run())
        yield top, prometheus, influx, f"http://{listen}/metrics"
    shutil.rmtree(top)


@pytest.fixture
def log(node):
    """Return a function that returns the sampler's new log messages."""
    path = node.state / "telemetry.log"
    before = path.stat().st_size if path.exists() else 0
    return lambda: path.read_text()[before:]


def close(a, b, rel=0.05):
    return a is not None and abs(a - b) <= rel * max(abs(a), abs(b), 1e-9)


def test_metrics_of_a_job_reach_prometheus_and_influxdb(monitored, guest, submit, disk, log):
    top, prometheus, influx, url = monitored
    job = submit(SCRIPT.format(host=HOST), "-vm", f"ram=128M,disk={disk}")
    guest.wait_for((guest.home / "worked").exists, what="the job's work")
    (domain,) = running_jobs.domains(job)

    # Values: the current ones of virsh and the kernel, within 5 %.
    def agree():
        said = domstats(domain)
        return all(close(prometheus.value(name), value) for name, value in said.items())

    guest.wait_for(agree, what=f"agreement of {domstats(domain)} with Prometheus")
    said = domstats(domain)
    assert said["vtorque_guest_cpu_seconds_total"] > 2.5
    assert said["sum(vtorque_guest_disk_written_bytes_total)"] > 8 << 20
    assert said["vtorque_guest_network_transmit_bytes_total"] > 2_000_000

    # Labels: vTorque's, the job's own, and no forged ones.
    labels = {"job": job, "user": guest.user, "guest": "0"}
    ((found, _),) = prometheus.query("vtorque_guest_cpu_seconds_total")
    assert labels.items() <= found.items() and found["node"]
    # Its lines arrive later than root's measurements; the rejected line is the last of them.
    rejected = "vtorque_job_app_lines_rejected_total"
    guest.wait_for(lambda: prometheus.value(rejected) == 1, what="the job's own lines")
    ((found, value),) = prometheus.query("vtorque_app_progress")
    assert (value, {**labels, "phase": "warm", "fold": "1"}.items() <= found.items()) == (
        0.25,
        True,
    )
    assert prometheus.query("vtorque_app_user") == []
    phases = {found["phase"] for found, _ in prometheus.query("vtorque_job_phase_seconds")}
    assert {"plan", "boot", "run"} <= phases
    assert 0 < prometheus.value("vtorque_guest_boot_seconds") < 60

    # InfluxDB has the same values.
    for name in ("cpu_seconds_total", "network_transmit_bytes_total", "memory_rss_bytes"):
        name = f"vtorque_guest_{name}"  # noqa: PLW2901
        value, tags = influx.last(name, job=job)
        assert close(value, said[name]), name
        assert labels.items() <= tags.items()
    guest.wait_for(lambda: influx.last("vtorque_app_progress", job=job), what="InfluxDB's own")
    assert influx.last("vtorque_app_progress", job=job)[0] == 0.25

    # Access: the endpoint needs the token; only its writer and group can read the textfile.
    done = guest.as_user(
        "/usr/bin/python3",
        "-c",
        "import sys, urllib.request as u; u.urlopen(sys.argv[1])",
        url,
        check=False,
    )
    assert b"401" in done.stderr
    file = top / "textfile/vtorque.prom"
    assert (file.stat().st_mode & 0o777, file.stat().st_uid) == (0o640, Settings().uid)
    line = f'vtorque_app_progress{{fold="1",phase="warm",job="{job}"'
    guest.wait_for(lambda: line in file.read_text(), what="the line in the textfile")

    # After the job its series become stale, and nothing of the sampler is left.
    (guest.home / "go").touch()
    guest.wait_for(lambda: guest.state_of(job) in (None, "C"), what="the job's end")
    guest.wait_for(lambda: prometheus.query(f'{{job="{job}"}}') == [], what="stale series")
    assert not file.exists()
    assert not list(guest.run_dir.glob("telemetry*"))
    assert "exporter" not in log(), log()
    check_kept_samples(guest, job, said)


def check_kept_samples(guest, job, said):
    """Check a job's samples after its end: complete, and readable for its owner only."""
    uid = pwd.getpwnam(guest.user).pw_uid
    path = guest.state / "kept" / str(uid) / f"{job}.0" / "series.jsonl"
    text = guest.as_user("/usr/bin/cat", str(path)).stdout.decode()
    head, *lines = [json.loads(line) for line in text.splitlines()]
    assert (head["job"], head["interval"]) == (job, 1.0)
    last = [line["v"] for line in lines if line["g"] == 0]
    assert last[-1]["vtorque_guest_cpu_seconds_total"] >= said["vtorque_guest_cpu_seconds_total"]
    assert any(values.get("vtorque_app_result") == 42 for values in last)
    other = guest.as_user("/usr/bin/cat", str(path), user=OTHER, check=False)
    assert (other.returncode, other.stdout) == (1, b"")


# A boot sector that reads its disk forever: INT 13h, function 42h, 64 sectors at a time.
READ = bytes.fromhex(
    "31c08ed8 b280be107cb442cd13 ebf1 90 1000400000000010 0000000000000000".replace(" ", "")
)
DOMAIN = """
<domain type="qemu"><name>{name}</name><uuid>{uuid}</uuid><memory unit="MiB">32</memory>
<vcpu>1</vcpu><iothreads>1</iothreads><os><type arch="x86_64" machine="q35">hvm</type></os><devices>
<disk type="file"><driver name="qemu" type="raw" iothread="1"/><source file="{disk}"/>
<target dev="vda" bus="virtio"/></disk><memballoon model="none"/></devices></domain>
"""


@pytest.fixture
def four(clean, scratch):
    """Four guests that read their disks, of one job according to its journal."""
    paths = running_journal.paths_below(scratch)
    job = running_journal.JournalledJob(paths, "four.srv", guests=4)
    for name, uuid in zip(job.names, job.uuids, strict=True):
        disk = scratch / f"{name}.disk"
        disk.write_bytes((READ.ljust(510, b"\0") + b"\x55\xaa").ljust(1 << 20, b"\0"))
        disk.chmod(0o666)
        xml = scratch / f"{name}.xml"
        xml.write_text(DOMAIN.format(name=name, uuid=uuid, disk=disk))
        running_jobs.virsh("create", str(xml))
    yield paths
    for name in job.names:
        running_jobs.virsh("destroy", name)


@pytest.mark.full
def test_four_guests_are_measured(four, clean):
    taken = []
    outlet = SimpleNamespace(give=lambda samples, _ended: taken.append(samples))
    loop = halves.loop(four, [outlet])

    def moved():
        loop.tick()
        found = [s.value for s in taken[-1] if s.name == "vtorque_guest_disk_read_bytes_total"]
        return len(found) == 4 and all(value > 1 << 20 for value in found)

    clean.wait_for(moved, what="reads of four guests")
    names = {s.name for s in taken[-1]}
    assert {f"vtorque_guest_{n}_cpu_seconds_total" for n in ("emulator", "iothread")} < names
    busy = [s.value for s in taken[-1] if s.name == "vtorque_guest_iothread_cpu_seconds_total"]
    assert len(busy) == 4 and all(busy)
    hypervisor.close()


@pytest.mark.full
def test_bad_sinks_delay_no_job(guest, config, log):
    hole = socket.create_server(("127.0.0.1", 0))  # accepts and answers nothing
    for line in (
        'exporters = ["influxdb", "prometheus", "textfile"]', 'interval = 0.5',
        f'influx_url = "http://127.0.0.1:{hole.getsockname()[1]}/write?db=x"',
        'textfile = "/proc/none/x.prom"',
    ):  # fmt: skip
        config("plugin.telemetry", line)
    done = guest.job("#!/bin/sh\nsleep 4\necho ran\n", "-vm", "ram=128M,vms_per_node=2")
    hole.close()
    assert (done.code, done.out) == (0, b"ran\n")
    mine = [line for line in log().splitlines() if "exporter influxdb" in line]
    assert len(mine) == 1 and ("no answer" in mine[0] or "timed out" in mine[0]), log()
    assert "exporter prometheus: HostFault: everybody" in log()
    assert "exporter textfile: FileNotFoundError" in log()
