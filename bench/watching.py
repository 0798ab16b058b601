"""Measure the cost of monitoring: samples, logs, and the plugins' part of a start.

The nodes are recorded (tests/support), so that no guest influences the figures.
"""

from __future__ import annotations

import importlib
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from figures import Figure, compare
from measures import Bench

from vtorque_core.api.log_levels import parse
from vtorque_core.base.names import JobAttempt, Paths
from vtorque_core.records import log

REPO = Path(__file__).resolve().parents[1]
GUESTS = 50
RECORDS = 300
ROUNDS = 9
TESTS = REPO / ".venv/bin/python3"  # of scripts/test: a node's prefix has no testing kit


def watching(bench: Bench) -> list[Figure]:
    """Measure CPU of samples and log records, and how long monitoring delays a start."""
    return [*_sampler(bench), _records(bench), _starts(bench)]


def _sampler(bench: Bench) -> list[Figure]:
    sys.path[:0] = [str(REPO / "plugins/telemetry/tests/support"), str(REPO / "tests/support")]
    names = ("halves", "measured", "running_journal")  # of the tests
    halves, measured, running_journal = map(importlib.import_module, names)
    from vtorque_telemetry.process import Sampler  # noqa: PLC0415 - needs the prefix
    from vtorque_telemetry.threads import QemuProcess  # noqa: PLC0415

    top = bench.scratch / "sampler"
    paths = running_journal.paths_below(top)
    jobs = [running_journal.JournalledJob(paths, f"{n}.srv") for n in range(GUESTS)]
    recorded = {uuid: measured.domstats() for job in jobs for uuid in job.uuids}
    loop = halves.loop(paths, [], lambda _uri: recorded)
    loop.tick()
    for meter in loop.jobs.values():
        for guest, _ in meter._guests.values():  # a real process stands for each QEMU
            guest._process = QemuProcess(Path(f"/proc/{os.getpid()}"))
    cpu = [_cpu(loop.tick) * 1000 for _ in range(ROUNDS)]
    config = top / "vtorque.toml"
    config.write_text("[plugin.telemetry]\ninterval = 60\n")
    sampler = Sampler.for_node(paths, config)
    waits = []
    for _ in range(ROUNDS):
        begun = time.monotonic()
        sampler.create()
        waits.append((time.monotonic() - begun) * 1000)
        sampler.release()
    return [
        compare(f"telemetry: a sample of {GUESTS} guests, CPU", "ms", cpu, limit=bench.scaled(8)),
        compare("telemetry: delay of a start by its process", "ms", waits, limit=bench.scaled(3)),
    ]


def _records(bench: Bench) -> Figure:
    top = bench.scratch / "log"
    paths = Paths(top / "state", top / "run")
    for path in (paths.state, paths.run):
        path.mkdir(parents=True)
    spent = []
    with log.open_log(
        log.Log(paths, JobAttempt("9.srv", 0, "u", os.getuid(), "n1"), parse("info"))
    ):
        for _ in range(ROUNDS):
            spent.append(_cpu(_write))
    return compare(f"{RECORDS} records of a job's log, CPU", "s", spent, limit=bench.scaled(0.03))


def _write() -> None:
    for number in range(RECORDS):
        logging.getLogger("vtorque_core.node.start.boot").info("%d", number)


def _cpu(work: Callable[[], object]) -> float:
    begun = time.process_time()
    work()
    return time.process_time() - begun


def _starts(bench: Bench) -> Figure:
    """Return how much joblog, snap and telemetry together delay the start of a job."""
    double = REPO / "plugins/snap/tests/support/snapteld_double.py"
    bare, watched = [], []
    top = bench.scratch / "starts"
    top.mkdir(mode=0o755)
    argv = [sys.executable, str(double), "{}"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as snapteld:
        try:
            assert snapteld.stdout is not None
            url = f"http://localhost:{int(snapteld.stdout.readline())}"
            for n in range(ROUNDS):
                bare.append(_start(top / f"bare{n}", "", "linux-guest"))
                plugins = ("linux-guest", "snap", "telemetry", "joblog")
                watched.append(_start(top / f"watched{n}", url, *plugins))
        finally:
            snapteld.kill()
    added = [with_all - without for with_all, without in zip(watched, bare, strict=True)]
    name = "joblog, snap and telemetry: added to a start"
    return compare(name, "ms", added, limit=bench.scaled(20))


def _start(directory: Path, url: str, *plugins: str) -> float:
    """Return the milliseconds of a start in a new process, as small as a hook's process."""
    directory.mkdir()
    directory.chmod(0o755)
    task = directory / "task.json"
    shutil.copy(REPO / "plugins/snap/vtorque_snap/example-task.json", task)
    task.chmod(0o600)
    support = REPO / "tests/support"
    argv = [str(TESTS), str(support / "watched_start.py"), str(directory), "1.srv", url, *plugins]
    environ = {"PYTHONPATH": str(support), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, check=True)
    return float(done.stdout)
