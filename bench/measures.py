"""Measurements of jobs. Each function alternates vTorque and its baseline, and returns figures."""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import bare
from figures import Figure, compare
from node import BenchNode, JobTimes

from vtorque_core.resources.disk import Overlay

FIRST = "#!/bin/sh\necho first >&2\necho last\n"
MEGABYTES = 50
# Not head -c: busybox's reads and writes byte by byte, at 8 MB/s under emulation.
FLOOD = f"exec dd if=/dev/zero bs=1000000 count={MEGABYTES} 2>/dev/null\n"
MUCH = "dd if=/dev/zero bs=1000000 count=120 2>/dev/null"
# The shortest way to a reader inside a guest: the minimum cost of any output of it.
PIPED = f"{MUCH} | dd bs=32760 of=/dev/null 2>/dev/null"
LINES = "i=0; while [ $i -lt 10000 ]; do echo line $i of many lines of output; i=$((i+1)); done"
IMPORTS = "import click, pluggy, importlib_metadata"
# Milliseconds of CPU time that a Python with these imports takes on the reference machine.
REFERENCE = 51.0
WRAPPER = 0.2  # seconds from READY until the job wrapper sends START; see "READY to first line"


@dataclass(frozen=True)
class Bench:
    """The node, a directory that only root can access, and the number of rounds."""

    node: BenchNode
    scratch: Path
    rounds: int

    def import_times(self, rounds: int = 9) -> list[float]:
        """Return the milliseconds of CPU time of a Python with a few imports, several times."""
        argv = ["python3", "-c", IMPORTS]
        return [self.node.run(argv).cpu * 1000 for _ in range(rounds)]

    def scaled(self, limit: float) -> float:
        """Return a limit of the reference machine for this machine's present speed.

        A machine whose CPU takes twice the time for the same imports gets twice the limit.
        """
        return limit * statistics.median(self.import_times()) / REFERENCE


def submit(bench: Bench) -> list[Figure]:
    """Measure the CPU time of a submission, while the job stays queued behind another one."""
    node = bench.node
    blocker = node.submit("#!/bin/sh\nsleep 600\n", "-vm", "none")
    script = node.script("#!/bin/sh\ntrue\n")
    ours: list[float] = []
    base: list[float] = []
    jobs: list[str] = []
    try:
        for _ in range(15):
            done = node.run(["vsub", "-N", "b", "-vm", "vcpus=1,ram=512M", script])
            jobs.append(done.out.decode().strip())
            ours.append(done.cpu * 1000)
            base += bench.import_times(1)
    finally:
        for job in jobs:
            node.run(["vmgr", "cancel", job])
        node.cancel(blocker)
    return [compare(f"vsub, CPU (python -c '{IMPORTS}')", "ms", ours, base, 3.4)]


def start(bench: Bench) -> list[Figure]:
    """Measure micro from the prologue to the script's first line, and the teardown."""
    return _start(bench, "micro", bench.scaled(0.55), bench.rounds, short=True)


def ends(bench: Bench) -> list[Figure]:
    """Measure how long a user waits before a job's first line and after its last."""
    args = ("-vm", "img=micro,ram=512M,vcpus=1")
    guests = bare.capture(bench.node, bench.scratch, *args)
    ours, plain, booted = [], [], []
    for _ in range(bench.rounds):
        ours.append(bench.node.waited_for(FIRST, *args))
        plain.append(bench.node.waited_for(FIRST, "-vm", "none"))
        booted.append(bare.first_lines(guests, bench.scratch))
    base = [begin + boot for (begin, _), boot in zip(plain, booted, strict=True)]
    name = "vsub to the first line (plain job plus bare QEMU)"
    return [
        compare(name, "s", [begin for begin, _ in ours], base, 1.3),
        compare("  plain job", "s", [begin for begin, _ in plain]),
        compare(
            "last line to vsub's end (plain job)",
            "s",
            [end for _, end in ours],
            [end for _, end in plain],
        ),
    ]


def debian(bench: Bench) -> list[Figure]:
    """Measure the start of the Debian image with systemd and cloud-init."""
    return _start(bench, "debian", 1.1, max(3, bench.rounds // 3), short=False)


def _start(bench: Bench, image: str, limit: float, rounds: int, *, short: bool) -> list[Figure]:
    """Measure starts. If ``short``, ``limit`` is for the difference, and teardowns are measured."""
    args = ("-vm", f"img={image},ram=512M,vcpus=1")
    guests = bare.capture(bench.node, bench.scratch, *args)
    jobs: list[JobTimes] = []
    base = []
    for _ in range(rounds):
        jobs.append(bench.node.job(FIRST, *args))
        base.append(bare.first_lines(guests, bench.scratch))
    ours = [job.first_line - job.prologue for job in jobs]
    name = f"{image}: start to first line (bare QEMU)"
    figures = [compare(name, "s", ours, base, limit, limits_more=short)]
    figures += _phases(image, jobs)
    if short:
        spans = [job.ended - job.epilogue for job in jobs]
        figures.append(
            compare("teardown: the epilogue's process", "s", spans, limit=bench.scaled(0.6))
        )
        spans = [job.released - job.last_byte for job in jobs]
        limit = bench.scaled(0.25)
        figures.append(compare("  last byte of output to all released", "s", spans, limit=limit))
    return figures


def _phases(image: str, jobs: list[JobTimes]) -> list[Figure]:
    """Return the duration of each phase, from the job's own timeline."""
    spans: dict[str, Callable[[JobTimes], float]] = {
        "vsub, batch system": lambda j: j.prologue - j.submitted,
        "hook's start": lambda j: j.phases["plan"] - j.prologue,
        "plan, render": lambda j: j.phases["pre-boot"] - j.phases["plan"],
        "pre-boot (overlay, seed, daemons)": lambda j: j.phases["boot"] - j.phases["pre-boot"],
        "boot (libvirt)": lambda j: j.phases["ready"] - j.phases["boot"],
        "guest until READY": lambda j: j.phases["post-boot"] - j.phases["ready"],
        "READY to first line": lambda j: j.first_line - j.phases["post-boot"],
    }
    return [
        compare(f"  {image}: {name}", "s", [span(job) for job in jobs])
        for name, span in spans.items()
    ]


def output(bench: Bench) -> list[Figure]:
    """Measure the first byte of a program's output in a fresh guest, and 50 MB of output."""
    flood = f"#!/bin/sh\n{FLOOD}".encode()
    args = ("-vm", "img=micro,ram=512M,vcpus=1")
    guests = bare.capture(bench.node, bench.scratch, *args)
    first, again, login, stream, job = [], [], [], [], []
    for _ in range(max(3, bench.rounds // 2)):
        with bare.booted(guests, bench.scratch) as running:
            session = running[0].session()
            time.sleep(WRAPPER)
            run = bare.timed_run(session, bare.program(bare.FIRST))
            first.append((run.first - run.began) * 1000)
            run = bare.timed_run(session, bare.program(bare.FIRST))
            again.append((run.first - run.began) * 1000)
            run = bare.timed_run(session, bare.script(bare.FIRST))
            login.append((run.first - run.began) * 1000)
            run = bare.timed_run(session, bare.script(flood))
            stream.append(run.ended - run.first)
            if run.size != MEGABYTES * 1_000_000:
                raise RuntimeError(f"{run.size} bytes arrived")
        times = bench.node.job(f"#!/bin/sh\necho first >&2\n{FLOOD}", *args)
        job.append(times.last_byte - times.first_line)
    return [
        compare("first byte of a guest's first program", "ms", first, limit=bench.scaled(20)),
        compare("  of its second program", "ms", again),
        compare("  of its first login shell with a script", "ms", login),
        compare(f"{MEGABYTES} MB of output: the stream", "s", stream, limit=bench.scaled(2)),
        compare(f"{MEGABYTES} MB of output: a job's file", "s", job, limit=bench.scaled(2)),
    ]


def much(bench: Bench) -> list[Figure]:
    """Measure 120 MB of output and 10,000 lines.

    Baselines are a plain job, and the cost of producing the same output inside the guest.
    """
    args = ("-vm", "img=micro,ram=512M,vcpus=1")
    guests = bare.capture(bench.node, bench.scratch, *args)
    spans: dict[str, list[float]] = {}

    def note(name: str, seconds: float) -> None:
        spans.setdefault(name, []).append(seconds)

    for _ in range(max(3, bench.rounds // 2)):
        text = f"#!/bin/sh\necho first >&2\nexec {MUCH}\n"
        note("job", bench.node.writing(text, *args))
        note("plain", bench.node.writing(text, "-vm", "none"))
        with bare.booted(guests, bench.scratch) as running:
            session = running[0].session()
            for name, program in (
                ("out", MUCH),
                ("inside", PIPED),
                ("lines", LINES),
                ("unread", f"({LINES}) >/dev/null"),
            ):
                content = f"#!/bin/sh\n{program}\necho over\n".encode()
                run = bare.timed_run(session, bare.script(content))
                note(name, run.ended - run.began)
    return [
        compare("120 MB of output: a job's file (plain job)", "s", spans["job"], spans["plain"], 2),
        compare("  out of a guest (through a pipe in it)", "s", spans["out"], spans["inside"], 1.7),
        compare("  10,000 lines (into its /dev/null)", "s", spans["lines"], spans["unread"], 1.4),
    ]


def disk(bench: Bench) -> list[Figure]:
    """Compare the creation of a job's overlay over images of 20 GB and of 100 MB."""
    times: dict[str, list[float]] = {"100M": [], "20G": []}
    for size in times:
        image = str(bench.scratch / f"{size}.qcow2")
        subprocess.run(["qemu-img", "create", "-q", "-f", "qcow2", image, size], check=True)
    for _ in range(21):
        for size, spans in times.items():
            path = str(bench.scratch / "overlay.qcow2")
            layer = Overlay(path, str(bench.scratch / f"{size}.qcow2"), "qcow2", uid=0)
            began = time.monotonic()
            layer.create()
            spans.append((time.monotonic() - began) * 1000)
            layer.release()
    return [compare("job disk over 20 GB (over 100 MB)", "ms", times["20G"], times["100M"], 1.2)]


def parallel(bench: Bench) -> list[Figure]:
    """Compare four guests of a job, until its first line, with four bare QEMU processes."""
    args = ("-vm", "img=micro,ram=256M,vcpus=1,vms_per_node=4")
    guests = bare.capture(bench.node, bench.scratch, *args)
    jobs, base = [], []
    for _ in range(max(3, bench.rounds // 2)):
        jobs.append(bench.node.job(FIRST, *args))
        base.append(bare.first_lines(guests, bench.scratch))
    ours = [job.first_line - job.prologue for job in jobs]
    figure = compare("4 guests of a job (4 bare QEMUs)", "s", ours, base, 1.15)
    return [figure, *_phases("4 guests", jobs)]


ALL: Mapping[str, Callable[[Bench], list[Figure]]] = {
    "submit": submit,
    "disk": disk,
    "start": start,
    "ends": ends,
    "output": output,
    "much": much,
    "parallel": parallel,
    "debian": debian,
}
