"""Measure suspend, resume and checkpoint of a job against ``virsh``.

The jobs have one or two guests on this node. The times come from libvirt's events.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from figures import Figure, compare
from measures import Bench
from node import BenchNode, wait
from warm import configured

SHAPE = "img=micro,ram=512M,vcpus=1"
_HOLD = 3.0  # seconds between suspend and resume
_SETS = 2.0  # seconds in which a guest has to set its clock
_READS = 9  # of a guest's clock
# busybox's date prints whole seconds only.
CLOCK = """#!/bin/sh
while :; do busybox adjtimex > new.$(hostname); mv new.$(hostname) now.$(hostname); done
"""
USES = """#!/bin/sh
head -c 100000000 /dev/urandom > /dev/shm/used
touch used
while [ ! -e go ]; do sleep 0.1; done
"""
_EVENT = re.compile(r"(.+): event 'lifecycle' for domain '?(vt-[^' ]+)'?: (Suspended|Resumed) ")
_CLOCK = re.compile(r"time\.tv_sec:\s+(\d+)\s+time\.tv_usec:\s+(\d+)")


def still(bench: Bench) -> list[Figure]:
    """Measure the pause, its skew between guests, and the error of the guests' clocks."""
    gaps: dict[str, list[float]] = {"vmgr": [], "virsh": []}
    skews: dict[str, list[float]] = {"Suspended": [], "Resumed": []}
    before, after = [], []
    with _two_guests(bench.node) as (job, names), _events(bench.scratch / "events") as events:
        ways: dict[str, Callable[[str], object]] = {
            "vmgr": lambda word: bench.node.run(["vmgr", word, job]),
            "virsh": lambda word: [_virsh(word, name) for name in names],
        }
        before.append(_clock_error(bench.node))
        for _ in range(bench.rounds):
            for way, call in ways.items():
                at = _held(call, events, 2 * len(names))
                gaps[way] += [at[name, "Resumed"] - at[name, "Suspended"] for name in names]
                if way == "vmgr":
                    time.sleep(_SETS)
                    after.append(_clock_error(bench.node))
                    for word, found in skews.items():
                        times = [at[name, word] for name in names]
                        found.append(max(times) - min(times))
    name = f"suspended for {_HOLD:g} s (virsh)"
    return [
        compare(f"{name}: time paused", "s", gaps["vmgr"], gaps["virsh"], 1.2),
        compare("  suspend: skew between the guests", "s", skews["Suspended"], limit=0.2),
        compare("  resume: skew between the guests", "s", skews["Resumed"], limit=0.2),
        compare("  error of the guest's clock after the resume", "s", after, limit=0.1),
        compare("  error of the guest's clock before", "s", before),
    ]


def checkpoint(bench: Bench) -> list[Figure]:
    """Measure how long a checkpoint pauses a guest whose memory is in use.

    The baseline is manual: suspend, an external snapshot of the memory, resume. Debian 13 only.
    """
    gaps: dict[str, list[float]] = {"vmgr": [], "virsh": []}
    with _job_with_used_memory(bench) as job, _events(bench.scratch / "saved") as events:
        (name,) = [n for n in _virsh("list", "--name").split() if n.startswith(f"vt-{job}.")]
        ways: dict[str, Callable[[], object]] = {
            "vmgr": lambda: bench.node.run(["vmgr", "checkpoint", job]),
            "virsh": lambda: _save(name, bench.scratch),
        }
        for turn in range(bench.rounds):
            for way, call in list(ways.items())[:: 1 if turn % 2 else -1]:
                at = _seen(call, events, 2)
                gaps[way].append(at[name, "Resumed"] - at[name, "Suspended"])
    name = "checkpoint of a running job (virsh snapshot-create-as): time paused"
    return [compare(name, "s", gaps["vmgr"], gaps["virsh"], 1.3)]


def restored(bench: Bench) -> list[Figure]:
    """Measure the start of a restored guest whose memory is in use, against a boot. Debian 13 only.

    Both from the plan until the guest is ready.
    """
    times: dict[str, list[float]] = {"restored": [], "booted": []}
    with _job_with_used_memory(bench) as job:
        done = bench.node.run(["vmgr", "checkpoint", "--stop", job])
        checkpoint = done.out.decode().strip()
        wait(bench.node.idle, "the end of the saved job")
        (bench.node.home / "go").touch()
        for _ in range(bench.rounds):
            for way, more in (("restored", f"{SHAPE},resume={checkpoint}"), ("booted", SHAPE)):
                started = bench.node.submit("#!/bin/sh\n:\n", "-vm", more)
                wait(bench.node.idle, f"the end of {started}")
                _, phases = bench.node.timeline(started)
                times[way].append(phases["post-boot"] - phases["plan"])
    name = "restored guest: plan to READY (a boot)"
    return [compare(name, "s", times["restored"], times["booted"], 1)]


@contextmanager
def _job_with_used_memory(bench: Bench) -> Iterator[str]:
    """Run a job that uses 100 MB of its memory, on a node with checkpoints; yield its id."""
    place = bench.scratch / "checkpoints"
    place.mkdir(mode=0o700, exist_ok=True)
    with configured(bench.node, f'\n[plugin.survive]\ncheckpoints = "{place}"\n'):
        job = bench.node.submit(USES, "-vm", SHAPE)
        try:
            wait((bench.node.home / "used").exists, "the job's memory in use")
            yield job
        finally:
            if not bench.node.idle():
                bench.node.cancel(job)
            for name in ("used", "go"):
                (bench.node.home / name).unlink(missing_ok=True)


def _save(name: str, place: Path) -> None:
    """Save a guest's memory with virsh to a new file, because vmgr also keeps older checkpoints."""
    file = place / f"by-hand-{len(list(place.glob('by-hand-*')))}"
    disks = [line.split()[0] for line in _virsh("domblklist", name).splitlines() if line.strip()]
    none = [word for disk in disks for word in ("--diskspec", f"{disk},snapshot=no")]
    memory = f"file={file},snapshot=external"
    _virsh("suspend", name)
    _virsh("snapshot-create-as", name, "--no-metadata", "--memspec", memory, *none)
    _virsh("resume", name)


@contextmanager
def _two_guests(node: BenchNode) -> Iterator[tuple[str, list[str]]]:
    """Run a job whose two guests write their clocks to files; yield the job and its domains."""
    job = node.submit(CLOCK, "-vm", "img=micro,ram=256M,vcpus=1,vms_per_node=2")
    try:
        wait(lambda: any(node.home.glob("now.*")), "the job's first time")
        names = [n for n in _virsh("list", "--name").split() if n.startswith(f"vt-{job}.")]
        yield job, names
    finally:
        node.cancel(job)
        for pattern in ("now.*", "new.*"):
            for file in node.home.glob(pattern):
                file.unlink()


@contextmanager
def _events(path: Path) -> Iterator[Path]:
    """Write libvirt's lifecycle events to a file."""
    argv = ["stdbuf", "-oL", "virsh", "event", "--event", "lifecycle", "--loop", "--timestamp"]
    with path.open("wb") as file, subprocess.Popen(argv, stdout=file) as child:
        try:
            time.sleep(1)  # virsh does not report when it is ready
            yield path
        finally:
            child.terminate()


def _held(call: Callable[[str], object], events: Path, count: int) -> dict[tuple[str, str], float]:
    """Suspend and resume; return the times of the events by guest and event."""

    def both() -> None:
        begun = time.monotonic()
        call("suspend")
        time.sleep(max(0.0, begun + _HOLD - time.monotonic()))
        call("resume")

    return _seen(both, events, count)


def _seen(call: Callable[[], object], events: Path, count: int) -> dict[tuple[str, str], float]:
    """Run ``call``; return the times of its events, by guest and event."""
    skip = len(_EVENT.findall(events.read_text()))
    call()
    found: list[tuple[str, str, str]] = []

    def have_arrived() -> bool:
        found[:] = _EVENT.findall(events.read_text())[skip:]
        return len(found) >= count

    wait(have_arrived, "libvirt's events")
    return {(name, word): datetime.fromisoformat(at).timestamp() for at, name, word in found}


def _clock_error(node: BenchNode) -> float:
    """Return the median difference in seconds between a guest's clock and the file's mtime."""
    errors = []
    for _ in range(_READS):
        (file, *_others) = node.home.glob("now.*")
        with file.open() as opened:
            said, written = opened.read(), Path(f"/proc/self/fd/{opened.fileno()}").stat().st_mtime
        if found := _CLOCK.search(said):
            errors.append(abs(int(found[1]) + int(found[2]) / 1e6 - written))
        time.sleep(0.2)
    return sorted(errors)[len(errors) // 2]


def _virsh(*words: str) -> str:
    argv = ["virsh", "-q", *words]
    return subprocess.run(argv, capture_output=True, check=True, text=True).stdout
