"""Measure the benefit of warm guests, and their cost for other jobs."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean
from typing import Any

from figures import Figure, compare
from measures import FIRST, Bench
from node import BenchNode, JobTimes, wait

from vtorque_core.plan.placement import node_hardware

WARM, COLD = "ram=512M", "ram=520M"  # COLD has a size that matches no warm guest
KEPT = "img=micro vcpus=1 ram=512M min=1 max=1"
FIVE = "img=micro vcpus=1 ram=256M min=5"  # 2560 MiB with QEMU's overhead
ROOM = 2700  # MiB: enough for a job of 2304 without any of the five guests
JOBS = 10
_IDLE = 2.0  # seconds over which a paused guest's CPU time is counted


def warm(bench: Bench) -> list[Figure]:
    """Measure claim, first line and whole start, and memory and CPU of a paused guest."""
    node = bench.node
    jobs: dict[str, list[tuple[float, JobTimes]]] = {WARM: [], COLD: []}
    rss, cpu = [], []
    with _keeping(node):
        for _ in range(bench.rounds):
            for size, found in jobs.items():
                key = _waits(node)
                mib, share = _costs(key)
                rss.append(mib)
                cpu.append(share)
                begun = time.time()
                found.append((begun, node.job(FIRST, "-vm", f"img=micro,vcpus=1,{size}")))

    def ready(job: JobTimes) -> float:
        return job.phases["post-boot"] - job.phases["boot"]

    def whole(job: JobTimes) -> float:
        return job.first_line - job.prologue

    ours, base = ([job for _, job in found] for found in jobs.values())
    lines = [[job.first_line - begun for begun, job in found] for found in jobs.values()]
    return [
        compare(
            "warm: claim to READY (a boot)", "s", [*map(ready, ours)], [*map(ready, base)], 0.2
        ),
        compare("  prologue to first line", "s", [*map(whole, ours)], [*map(whole, base)]),
        compare("warm: vsub to first line", "s", lines[0], limit=bench.scaled(1.0)),
        compare("  vsub to first line of a boot", "s", lines[1]),
        compare("  a paused guest: memory of its QEMU", "MiB", rss),
        compare("  a paused guest: CPU", "%", cpu),
    ]


def full(bench: Bench) -> list[Figure]:
    """Measure jobs that fill a node one by one, while five warm guests match none of them."""
    node = bench.node
    host = node_hardware.topology("qemu:///system").mem_mib
    reserve = f'\n[node]\nhost_reserve_ram = "{host - ROOM}M"\n'
    ours, base = [], []
    for _ in range(max(1, bench.rounds // 4)):
        with configured(node, reserve):
            base.append(_submit_all(node))
        with _keeping(node, FIVE, reserve):
            wait(lambda: len(_waiting(node)) == 5, "five warm guests")
            ours.append(_submit_all(node))
    name = "full node, vsub to first line"
    return [
        compare(f"{name} of all, mean", "s", [*map(mean, ours)], [*map(mean, base)]),
        compare("  of the last", "s", [max(each) for each in ours], [max(each) for each in base]),
    ]


def _submit_all(node: BenchNode) -> list[float]:
    """Submit the jobs; return the seconds until the first line of each."""
    outputs = [node.home / f"full{number}" for number in range(JOBS)]
    script = node.script("#!/bin/sh\necho first\nsleep 2\n")
    since = time.time()
    for out in outputs:
        out.unlink(missing_ok=True)
        node.run(["vsub", "-N", "b", "-o", out.name, "-j", "oe", "-vm", "img=micro,ram=2G", script])
    wait(node.idle, "the end of the jobs")
    if wrong := [text for out in outputs if (text := out.read_text()) != "first\n"]:
        raise RuntimeError(f"a job printed {wrong[0]!r}")
    return [out.stat().st_mtime - since for out in outputs]


@contextmanager
def configured(node: BenchNode, more: str) -> Iterator[None]:
    """Append to the site config while the context is active."""
    before = node.config.read_text()
    node.config.write_text(before + more)
    try:
        yield
    finally:
        node.config.write_text(before)


@contextmanager
def _keeping(node: BenchNode, shape: str = KEPT, more: str = "") -> Iterator[None]:
    """Keep warm guests of a shape while the context is active."""
    with configured(node, f'{more}\n[plugin.warm]\nshapes = ["{shape}"]\n'):
        try:
            _command(node, "start")
            yield
        finally:
            _command(node, "stop")


def _command(node: BenchNode, *words: str) -> str:
    argv = [str(node.prefix / "bin/vtorque"), "warm", "--config", str(node.config), *words]
    return subprocess.run(argv, capture_output=True, check=True, text=True).stdout


def _waiting(node: BenchNode) -> list[dict[str, Any]]:
    """Return the warm guests that wait for a job."""
    guests: list[dict[str, Any]] = json.loads(_command(node, "--json"))["guests"]
    return [each for each in guests if each["state"] == "waits"]


def _waits(node: BenchNode) -> str:
    """Wait until a warm guest has been ready for a second; return its part of the libvirt name."""
    wait(lambda: bool(_waiting(node)), "a warm guest")
    time.sleep(1)
    return str(_waiting(node)[0]["key"])


def _costs(key: str) -> tuple[float, float]:
    """Return the memory in MiB and the CPU percentage of a paused guest's QEMU."""
    (pid,) = (int(p.read_text()) for p in Path("/run/libvirt/qemu").glob(f"vt-{key}-*.pid"))
    begun = _ticks(pid)
    time.sleep(_IDLE)
    used = (_ticks(pid) - begun) / os.sysconf("SC_CLK_TCK") / _IDLE * 100
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024, used


def _ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])
