"""Make a node's records of a job, in the form of core and telemetry, for a job of any length."""

import json
import math
from pathlib import Path

START = 1_795_000_000.0  # 2026-11-18
G = "vtorque_guest_"
PHASES = (
    ("plan", 0.04), ("render domain", 0.01), ("pre-boot", 0.13), ("boot", 0.4), ("ready", 2.2),
    ("post-boot", 0.01),
)  # fmt: skip
BOOT = sum(seconds for _, seconds in PHASES)


def phases(seconds, guests, used=True):
    """Return the phases of a job whose script runs for ``seconds``."""
    at, found = START, []
    for name, length in (*PHASES, ("run", seconds), ("teardown", 0.05)):
        found.append({"name": name, "guest": None, "start": at, "seconds": length})
        if name == "ready":
            for guest in range(guests):
                done = length * (0.8 + 0.02 * guest)
                mark = {"start": at + done, "seconds": done, "guest": guest}
                found += [{"name": "agent", **mark}, {"name": "ready", **mark}]
        at += length
    if used:
        for guest in range(guests):
            found.append({
                "name": "used", "guest": guest, "start": at, "seconds": 0.0,
                "cpu_seconds": seconds * 1.1, "peak_mib": 640,
            })  # fmt: skip
    found.append({"name": "release", "guest": None, "start": at, "seconds": 0.3})
    return found


def facts(job, seconds, guests, vcpus=4, ram_mib=8192, **more):
    """Return job.json of an ended job."""
    return {
        "schema": 1, "job": job, "attempt": 0, "owner": "ada", "uid": 1000, "node": "n1",
        "nodes": ["n1"], "name": "crystal", "batch": "slurm", "image": "debian-12",
        "guest_type": "linux", "started": START, "given": ["img", "ram", "vcpus"],
        "guests": [
            {"rank": n, "index": n, "hostname": f"vn1-{n}", "domain": f"vt-{job}.0-n1-{n}",
             "vcpus": vcpus, "ram_mib": ram_mib}
            for n in range(guests)
        ],
        "phases": phases(seconds, guests), "ended": START + BOOT + seconds + 0.4, "status": "0",
    } | more  # fmt: skip


def sample(guest, at, seconds, vcpus, ram_mib):
    """Return a guest's usage ``at`` seconds after its script's start; counters only grow."""
    part = at / seconds
    waves = seconds / (2 * math.pi * 6) * (1 - math.cos(at / seconds * 2 * math.pi * 6))
    load = 0.25 + 0.05 * guest
    cpu = 2.5 + vcpus * (load * at + 0.2 * waves)
    memory = (0.3 + 0.5 * (1 - math.exp(-5 * part)) + 0.1 * math.sin(part * 20) ** 2) * (1 << 30)
    return {
        f"{G}vcpus": vcpus,
        f"{G}memory_assigned_bytes": ram_mib << 20,
        f"{G}io_cores": 0,
        f"{G}boot_seconds": 2.1 + 0.05 * guest,
        f"{G}cpu_seconds_total": round(cpu, 6),
        f"{G}cpu_steal_seconds_total": round(0.02 * cpu + 0.1 * waves, 6),
        f"{G}emulator_cpu_seconds_total": round(0.05 * cpu, 6),
        f"{G}iothread_cpu_seconds_total": 0.0,
        f"{G}vhost_cpu_seconds_total": round(0.01 * cpu, 6),
        f"{G}memory_rss_bytes": int(memory + (200 << 20)),
        f'{G}page_faults_total{{kind="minor"}}': int(1e5 * part),
        f'{G}disk_read_bytes_total{{device="vda"}}': int(2e8 + 3e9 * part),
        f'{G}disk_written_bytes_total{{device="vda"}}': int(1e8 + 4e9 * part**2),
        f'{G}disk_read_bytes_total{{device="vdb"}}': 4096,
        f'{G}disk_written_bytes_total{{device="vdb"}}': 0,
        f'{G}network_receive_bytes_total{{device="nic0"}}': int(1e6 + 2e8 * part),
        f'{G}network_transmit_bytes_total{{device="nic0"}}': int(5e5 + 9e8 * part),
        f'{G}network_receive_drops_total{{device="nic0"}}': 0,
        'vtorque_app_loss{fold="2",phase="train"}': round(2.3 * math.exp(-3 * part), 6),
    }


def series(job, seconds, guests, vcpus=4, ram_mib=8192, change=lambda values: values):
    """Return series.jsonl, with the length that telemetry would write."""
    interval = 2.0
    while seconds / interval > 2000:
        interval *= 2
    lines = [{"schema": 1, "job": job, "node": "n1", "interval": interval}]
    begin = START + BOOT
    done = {f'vtorque_job_phase_seconds{{phase="{n}"}}': s for n, s in PHASES}
    lines.append({"t": begin, "g": None, "v": done})
    steps = int(seconds / interval)
    for at in [*(n * interval for n in range(steps + 1)), seconds]:
        for guest in range(guests):
            values = change(sample(guest, at, seconds, vcpus, ram_mib))
            lines.append({"t": round(begin + at, 3), "g": guest, "v": values})
    return "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)


def make(directory: Path, *, seconds=3600.0, guests=1, telemetry=True, change=None, **more):
    """Fill a directory with the records of an ended job; return it."""
    directory.mkdir(parents=True, exist_ok=True)
    job = more.pop("job", "42.srv")
    (directory / "job.json").write_text(json.dumps(facts(job, seconds, guests, **more)))
    if telemetry:
        text = series(job, seconds, guests, change=change or (lambda values: values))
        (directory / "series.jsonl").write_text(text)
    return directory
