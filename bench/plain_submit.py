"""Measure what a submit command costs with and without an addition, in turns.

python bench/plain_submit.py TURNS WITHOUT WITH COMMAND...

WITHOUT and WITH are shell commands that remove and add it, such as a line of plugstack.conf, of
torque.cfg, or a hook. CPU time is that of COMMAND and its children and, if the environment variable
SERVER has a pid, of that process. See results/plain-submit.md.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path


def server_ms() -> float:
    """Return the CPU time of the server in ms (schedstat of proc(5)); 0 without a server."""
    if not (pid := os.environ.get("SERVER")):
        return 0.0
    return int(Path("/proc", pid, "schedstat").read_text().split()[0]) / 1e6


def measure(command: Sequence[str]) -> tuple[float, float]:
    """Run the command; return its CPU and wall time in ms."""

    def spent() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return (used.ru_utime + used.ru_stime) * 1000 + server_ms()

    before, begun = spent(), time.monotonic()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    wall = (time.monotonic() - begun) * 1000
    return spent() - before, wall


def main(turns: str, without: str, added: str, *command: str) -> None:
    """Print medians of both, and of the differences within a turn."""
    rows: dict[str, list[tuple[float, float]]] = {without: [], added: []}
    for _ in range(int(turns)):
        for setup, found in rows.items():
            subprocess.run(setup, shell=True, check=True)
            found.append(measure(command))
    for name, found in zip(("without", "with"), rows.values(), strict=True):
        cpu, wall = (statistics.median(each) for each in zip(*found, strict=True))
        print(f"{name:8} {cpu:6.2f} ms CPU {wall:7.2f} ms")
    pairs = zip(*rows.values(), strict=True)
    more = [tuple(b - a for a, b in zip(*each, strict=True)) for each in pairs]
    cpu, wall = (statistics.median(each) for each in zip(*more, strict=True))
    print(f"{'more':8} {cpu:6.2f} ms CPU {wall:7.2f} ms")


if __name__ == "__main__":
    main(*sys.argv[1:])
