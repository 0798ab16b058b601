"""Inject every fault at every journaled step of a job, on recorded nodes: the fault matrix.

The steps come from the start and the teardown themselves (:mod:`.faults`), so the matrix covers
every installed plugin. A :class:`Bench` is one or two nodes that also run another job.
:func:`try_all` injects a fault at each step, runs the epilogue or the reaper, and compares the
observable state of the nodes with the state before.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from vtorque_core.api.batch_system import BatchJob
from vtorque_core.base.names import Paths
from vtorque_core.plan.placement.ledger import MEMORY, NODE, SHARE
from vtorque_core.records.reading import LEASE, Record, journals, read
from vtorque_testing.faults import ChildResult, assert_unchanged, children, run_in_child
from vtorque_testing.recorded import DOWN, RecordedNode

Side = Literal["start", "end"]


@dataclass(frozen=True)
class Point:
    """A step: of the start or of the end, its number from 1, its phase, its name."""

    side: Side
    number: int
    phase: str
    step: str

    @property
    def kind(self) -> str:
        """The kind of its resource; empty for the beginning of a phase."""
        return "" if self.step.startswith("phase ") else self.step.rpartition(" ")[2]

    @property
    def row(self) -> tuple[str, str]:
        """The line of the matrix: phase and kind."""
        return self.phase, self.kind


def points(side: Side, steps: Sequence[str]) -> Iterator[Point]:
    """Yield the points of a run without faults."""
    phase = {"start": "begin", "end": "teardown"}[side]
    for number, step in enumerate(steps, start=1):
        if step.startswith("phase "):
            phase = step.removeprefix("phase ")
        yield Point(side, number, phase, step)


@dataclass
class FaultBench:
    """The nodes of a job; faults happen on the first node.

    Args:
        nodes: each with its own directory.
        jobs: the job as each node sees it.
        other: another user's job on the first node, which must not be affected, or None.
        processes: their processes (:func:`vtorque_testing.faults.orphans`).
        patience: seconds in which the nodes have to be as before.
        away: processes that :meth:`joined` waits for.
    """

    nodes: Sequence[RecordedNode]
    jobs: Sequence[BatchJob]
    other: BatchJob | None
    processes: Callable[[], Sequence[str]]
    patience: float = 10.0
    away: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.node, self.job = self.nodes[0], self.jobs[0]
        self.fresh = self.node.top.with_name(f"{self.node.top.name}-fresh")
        shutil.copytree(self.node.top, self.fresh, symlinks=True)
        self.known = set(children())
        self.bare = self.observe()
        self.start_others()

    def start_others(self) -> None:
        """Start the other job and processes, and record the nodes' state."""
        for node, job in zip(self.nodes[1:], self.jobs[1:], strict=True):
            assert not (run := node.start(job)).error, run
        if self.other is not None:
            assert not (run := self.node.start(self.other)).error, run
        self.before = self.observe()

    def end_others(self) -> None:
        """End the other jobs. Raises AssertionError if anything is left."""
        for node, job in zip(self.nodes[1:], self.jobs[1:], strict=True):
            node.release(job.id)
        if self.other is not None:
            self.node.release(self.other.id)
        assert_unchanged(self, self.bare, "with no job left", self.patience)

    def observe(self) -> dict[str, object]:
        """Return the state of all nodes."""
        found: dict[str, object] = {"processes": self.processes()}
        for number, node in enumerate(self.nodes, start=1):
            found |= {f"node {number}: {name}": value for name, value in node.observe().items()}
        return found

    @property
    def paths(self) -> Paths:
        """The directories of the first node."""
        return self.node.site.paths

    def start(self, last: int | None = None, **fault: Any) -> ChildResult:
        """Start the job on the first node."""
        return self.node.start(self.job, last, **fault)

    def release(
        self,
        last: int | None = None,
        *,
        first: Callable[[], object] = lambda: None,
        how: Mapping[str, Any] | None = None,
        **fault: Any,
    ) -> ChildResult:
        """Release the job on the first node, in a process that calls ``first`` before."""

        def work() -> None:
            first()
            self.node.release_in_process(self.job.id, **(how or {}))

        return run_in_child(work, last, **fault)

    def behind(self, work: Callable[[], object]) -> None:
        """Run ``work`` in a process for which :meth:`joined` waits."""
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                code = int(bool(run_in_child(work).error))
            finally:
                os._exit(code)
        self.away.append(pid)

    def joined(self) -> None:
        """Wait for the background processes. Raises AssertionError if one failed."""
        while self.away:
            _, status = os.waitpid(self.away.pop(), 0)
            assert status == 0, "the concurrent process has failed"

    def libvirtd(self, *, up: bool) -> None:
        """Let the hypervisor answer if ``up`` is true."""
        mark = self.node.top / "domains" / DOWN
        mark.unlink() if up else mark.touch()

    def guests_die(self) -> None:
        """End all QEMUs of the job."""
        for path in (self.node.top / "domains").glob(f"vt-{self.job.id}.*.xml"):
            path.unlink()

    def reboot(self) -> None:
        """Kill all processes; everything outside of disks is reset as after a boot."""
        for pid in set(children()) - self.known:
            os.kill(pid, signal.SIGKILL)
        for each in self.fresh.iterdir():
            there = self.node.top / each.name
            if each.is_dir() and each.name not in ("state", "images"):
                shutil.rmtree(there)
                shutil.copytree(each, there, symlinks=True)

    def records(self) -> list[Record]:
        """Return the open records of the job on the first node."""
        found = (read(path) for path in journals(self.paths))
        return [r for state in found if state.header.job.id == self.job.id for r in state.open]

    def others_leases(self) -> set[tuple[str, str]]:
        """Return the leases that another job with the same request would get; release them."""
        again = replace(self.job, id="77")
        self.node.start(again)
        found = (read(path) for path in journals(self.paths))
        leases = [r for state in found if state.header.job.id == again.id for r in state.leases]
        self.node.release(again.id)
        return exclusive(leases)


def exclusive(records: Iterable[Record]) -> set[tuple[str, str]]:
    """Return pool and item of exclusive leases."""
    leases = [record.args for record in records if record.kind == LEASE]
    return {(a["pool"], a["item"]) for a in leases if a["pool"] not in (MEMORY, SHARE, NODE)}


Strike = Callable[..., ChildResult]


@dataclass(frozen=True)
class Fault:
    """A fault: its name, its steps, and the function that injects and repairs it.

    ``work`` gets the bench, the point, and a function that runs the job's start or release with the
    fault.
    """

    name: str
    at: Callable[[Point], bool]
    work: Callable[[FaultBench, Point, Strike], None]


@dataclass(frozen=True)
class FaultResult:
    """Result of one fault at one step; ``leak`` says what was left, if anything."""

    fault: str
    point: Point
    leak: str = ""


def survey(bench: FaultBench) -> list[Point]:
    """Return all steps of a start and of its end. Raises AssertionError if they fail."""
    run = bench.start()
    assert not run.error, run
    end = bench.release()
    assert not end.error, end
    assert_unchanged(bench, bench.before, "not disturbed", bench.patience)
    return [*points("start", run.steps), *points("end", end.steps)]


def try_all(
    bench: FaultBench, faults: Iterable[Fault], wanted: Callable[[Point], bool] = lambda _: True
) -> tuple[list[Point], list[FaultResult]]:
    """Return all steps, and each fault's result at each of its wanted steps."""
    steps = survey(bench)
    results = []
    for fault in faults:
        for point in filter(fault.at, steps):
            if wanted(point):
                results.append(FaultResult(fault.name, point, try_one(bench, fault, point)))
    return steps, results


def try_one(bench: FaultBench, fault: Fault, point: Point) -> str:
    """Return what a fault at a step leaves, if anything."""

    def strike(**how: Any) -> ChildResult:
        return (bench.start if point.side == "start" else bench.release)(point.number, **how)

    where = f"{fault.name} at {point.side} {point.number}: {point.step}"
    try:
        if point.side == "end":
            assert not (run := bench.start()).error, run
        fault.work(bench, point, strike)
        bench.joined()
        assert_unchanged(bench, bench.before, where, bench.patience)
    except AssertionError as error:
        left = str(error)[:2000] or repr(error)
        _force(bench)
        return f"{where}: {left}"
    return ""


def _force(bench: FaultBench) -> None:
    """Restore the nodes after a leak, so that the leak does not affect the next fault."""
    (bench.node.top / "domains" / DOWN).unlink(missing_ok=True)
    while bench.away:
        os.waitpid(bench.away.pop(), 0)
    bench.release()


def table(
    steps: Sequence[Point], results: Sequence[FaultResult], faults: Sequence[str]
) -> list[str]:
    """Return the lines of a Markdown table: for each phase and kind, steps and faults tried.

    Faults that were tried at the same steps have one column.
    """
    rows = Counter(point.row for point in steps)
    tried = Counter((result.fault, result.point.row) for result in results)
    leaks = Counter((result.fault, result.point.row) for result in results if result.leak)

    def cell(fault: str, row: tuple[str, str]) -> str:
        if leaks[fault, row]:
            return f"**{leaks[fault, row]} of {tried[fault, row]} leak**"
        return str(tried[fault, row]) if tried[fault, row] else ""

    columns: dict[tuple[str, ...], list[str]] = {}
    for fault in faults:
        total = str(sum(result.fault == fault for result in results))
        columns.setdefault((*(cell(fault, row) for row in rows), total), []).append(fault)
    heads = ["phase", "record", "steps", *map(", ".join, columns.values())]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    begun = [f"| {phase} | {kind or '(begins)'} | {n} |" for (phase, kind), n in rows.items()]
    begun.append(f"| **all** | | {len(steps)} |")
    cells = [" | ".join(each) for each in zip(*columns, strict=True)] or [""] * len(begun)
    return lines + [f"{row} {each} |" for row, each in zip(begun, cells, strict=True)]


def read_steps(lines: Iterable[str]) -> dict[tuple[str, str], int]:
    """Return the number of steps for each phase and kind in a table of :func:`table`."""
    found = {}
    for line in lines:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) > 3 and cells[2].isdecimal() and cells[1]:
            found[cells[0], cells[1].replace("(begins)", "")] = int(cells[2])
    return found
