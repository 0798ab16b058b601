"""Simulate pools of several sizes for a trace of jobs: wait times and machine hours.

Traces have the Standard Workload Format, SWF 2.2
(https://www.cs.huji.ac.il/labs/parallel/workload/swf.html). The simulation uses field 2 (submit
time), 4 (run time), 5 (processors used) and 8 (processors requested). Times are in seconds.

Each job gets whole nodes. Jobs start in order of submission, but if a job does not fit, up to a
hundred later jobs may start before it. Nodes are created for queued jobs and deleted when idle.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vtorque_core.api import Refused, printable

_LOOKED_AT = 100
_NUMBER = re.compile(rb"-?\d{1,12}(\.\d{1,9})?")


@dataclass(frozen=True)
class TraceJob:
    """A job of a trace. Times are in seconds."""

    submit: float
    run: float
    processors: int


@dataclass(frozen=True)
class Sizes:
    """A pool: maximum and minimum nodes, idle time, CPUs per node, boot time. Times in seconds."""

    most: int
    least: int
    idle: float
    cpus: int = 1
    ready: float = 120.0


@dataclass(frozen=True)
class SimulationResult:
    """The result of a simulation.

    Wait times are in seconds. ``busy`` is the fraction of the machine hours in which jobs ran.
    ``starts`` is the number of created machines. ``too_large`` is the number of jobs that can never
    run.
    """

    sizes: Sizes
    jobs: int
    too_large: int
    mean_wait: float
    median_wait: float
    p95_wait: float
    machine_hours: float
    busy: float
    starts: int

    def data(self) -> dict[str, Any]:
        """Return the result for JSON."""
        return asdict(self)


def read(trace: Path) -> list[TraceJob]:
    """Return a trace's jobs, ordered by submit time. Raises Refused for an invalid line."""
    jobs = []
    for number, line in enumerate(trace.read_bytes().splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith(b";"):
            continue
        if len(words) < 8 or not all(_NUMBER.fullmatch(word) for word in words[:8]):
            text = printable(line[:60].decode("ascii", "replace"))
            raise Refused(f"{trace}: line {number} is not in the format SWF: {text}")
        submit, run = float(words[1]), float(words[3])
        processors = max(int(float(words[4])), int(float(words[7])))
        if run >= 0 and processors > 0:  # -1: unknown, for example for canceled jobs
            jobs.append(TraceJob(submit, run, processors))
    if not jobs:
        raise Refused(f"{trace} has no job with a run time and processors")
    return sorted(jobs, key=lambda job: job.submit)


class _Pool:
    """The simulated pool. ``events`` has tuples of time, sequence number, kind and node count."""

    def __init__(self, sizes: Sizes, start: float) -> None:
        self.sizes = sizes
        self.now = start
        self.idle = [start] * sizes.least  # times when nodes became idle; jobs use the last first
        self.building = 0
        self.busy = 0
        self.seconds = 0.0
        self.busy_seconds = 0.0
        self.starts = sizes.least
        self.events: list[tuple[float, int, str, int]] = []
        self.order = 0

    @property
    def nodes(self) -> int:
        return len(self.idle) + self.building + self.busy

    def schedule(self, when: float, what: str, number: int) -> None:
        self.order += 1
        heapq.heappush(self.events, (when, self.order, what, number))

    def advance(self, when: float) -> None:
        """Advance the time to ``when``, and add up the machine time until ``when``."""
        self.seconds += self.nodes * (when - self.now)
        self.busy_seconds += self.busy * (when - self.now)
        self.now = when

    def add_idle(self, count: int) -> None:
        self.idle += [self.now] * count
        self.schedule(self.now + self.sizes.idle, "idle", count)

    def grow(self, needed: int) -> None:
        """Create the nodes that queued jobs need in addition to idle and booting nodes."""
        new = min(self.sizes.most - self.nodes, needed - len(self.idle) - self.building)
        if new > 0:
            self.building += new
            self.starts += new
            self.schedule(self.now + self.sizes.ready, "ready", new)

    def shrink(self) -> None:
        while self.idle and self.nodes > self.sizes.least:
            if self.now - self.idle[0] < self.sizes.idle:
                break
            del self.idle[0]


def run(jobs: Sequence[TraceJob], sizes: Sizes) -> SimulationResult:
    """Simulate a trace's jobs on one pool."""
    if sizes.most < 1:
        raise Refused("a pool needs at least one node")
    pool = _Pool(sizes, jobs[0].submit)
    needs = [-(-job.processors // sizes.cpus) for job in jobs]
    waits = []
    queue: list[int] = []
    needed = coming = 0
    while coming < len(jobs) or queue or pool.busy:
        submit = jobs[coming].submit if coming < len(jobs) else float("inf")
        if pool.events and pool.events[0][0] <= submit:
            when, _, what, number = heapq.heappop(pool.events)
            pool.advance(when)
            if what == "end":
                pool.busy -= number
                pool.add_idle(number)
            elif what == "ready":
                pool.building -= number
                pool.add_idle(number)
        else:
            pool.advance(submit)
            if needs[coming] <= sizes.most:
                queue.append(coming)
                needed += needs[coming]
            coming += 1
        for each in [n for n in queue[:_LOOKED_AT] if needs[n] <= len(pool.idle)]:
            if needs[each] <= len(pool.idle):
                queue.remove(each)
                needed -= needs[each]
                del pool.idle[len(pool.idle) - needs[each] :]
                pool.busy += needs[each]
                pool.schedule(pool.now + jobs[each].run, "end", needs[each])
                waits.append(pool.now - jobs[each].submit)
        pool.grow(needed)
        if not queue:
            pool.shrink()
    waits.sort()
    return SimulationResult(
        sizes, len(waits), len(jobs) - len(waits),
        sum(waits) / len(waits) if waits else 0.0, _part(waits, 0.5), _part(waits, 0.95),
        pool.seconds / 3600, pool.busy_seconds / pool.seconds if pool.seconds else 0.0, pool.starts,
    )  # fmt: skip


def _part(waits: Sequence[float], part: float) -> float:
    return waits[min(len(waits) - 1, int(part * len(waits)))] if waits else 0.0


def table(results: Sequence[SimulationResult]) -> Iterator[str]:
    """Yield a table of the simulated pools, line by line."""
    yield (
        f"{'MOST':>5} {'LEAST':>5} {'IDLE':>7} {'JOBS':>6} {'MEAN WAIT':>10} {'MEDIAN':>8} "
        f"{'95 %':>9} {'HOURS':>10} {'BUSY':>5} {'STARTS':>7}"
    )
    for each in results:
        sizes = each.sizes
        yield (
            f"{sizes.most:5} {sizes.least:5} {sizes.idle:7.0f} {each.jobs:6} "
            f"{each.mean_wait:10.0f} {each.median_wait:8.0f} {each.p95_wait:9.0f} "
            f"{each.machine_hours:10.1f} {each.busy:5.0%} {each.starts:7}"
        )
    for most, jobs in sorted({each.sizes.most: each.too_large for each in results}.items()):
        if jobs:
            yield f"ignored {jobs} jobs that need more than {most} nodes"
