"""What a guest that is ready before its job saves: jobs that get one, and others, in turns."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from figures import Figure, compare
from measures import FIRST, Bench
from node import JobTimes, Node, wait

WARM, COLD = "ram=512M", "ram=520M"  # of another size, so that it matches none
KEPT = "img=micro vcpus=1 ram=512M least=1 most=1"
_IDLE = 2.0  # seconds over which a paused guest's CPU time is counted


def warm(bench: Bench) -> list[Figure]:
    """Boot to READY, vsub to the first line, the whole start; a paused guest's memory and CPU."""
    node = bench.node
    jobs: dict[str, list[tuple[float, JobTimes]]] = {WARM: [], COLD: []}
    rss, cpu = [], []
    with _keeping(node):
        for _ in range(bench.rounds):
            for size, found in jobs.items():
                key = _waiting(node)
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
        compare("warm: vsub to first line", "s", lines[0], limit=1.0),
        compare("  the same of a boot", "s", lines[1]),
        compare("  a paused guest: memory of its QEMU", "MiB", rss),
        compare("  a paused guest: CPU", "%", cpu),
    ]


@contextmanager
def _keeping(node: Node) -> Iterator[None]:
    """Have one guest of WARM ready."""
    before = node.config.read_text()
    node.config.write_text(f'{before}\n[plugin.warm]\nshapes = ["{KEPT}"]\n')
    try:
        _command(node, "start")
        yield
    finally:
        _command(node, "stop")
        node.config.write_text(before)


def _command(node: Node, *words: str) -> str:
    argv = [str(node.prefix / "bin/vtorque"), "warm", "--config", str(node.config), *words]
    return subprocess.run(argv, capture_output=True, check=True, text=True).stdout


def _waiting(node: Node) -> str:
    """Wait until one waits, and has for a moment; return its libvirt name's part."""
    found: list[dict[str, Any]] = []

    def there() -> bool:
        guests = json.loads(_command(node, "--json"))["guests"]
        found[:] = [each for each in guests if each["state"] == "waits"]
        return bool(found)

    wait(there, "a guest that waits")
    time.sleep(1)
    return str(found[0]["key"])


def _costs(key: str) -> tuple[float, float]:
    """Return MiB that a paused guest's QEMU has, and percent of a CPU that it uses."""
    (pid,) = (int(p.read_text()) for p in Path("/run/libvirt/qemu").glob(f"vt-{key}-*.pid"))
    begun = _ticks(pid)
    time.sleep(_IDLE)
    used = (_ticks(pid) - begun) / os.sysconf("SC_CLK_TCK") / _IDLE * 100
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024, used


def _ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])
