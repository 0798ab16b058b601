"""Read the numbers of an ended job from the files in the directory of the job's point."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from vtorque_core.api import printable
from vtorque_core.live import service
from vtorque_experiment import batch, files, take, wrapper
from vtorque_experiment.book import PointRow
from vtorque_experiment.definition import Definition
from vtorque_experiment.place import read_tail

EMULATED = "emulated"
"""The last word of a point's file ``machine`` if its guest had no KVM."""
_SIGNS = ("QEMU TCG CPU", "guests are emulated")  # a CPU model; a message of vsub and the node
_SHORT = 4096  # bytes that are read from the end of a file
MAX_REPORT = 64 << 20
REPORT_TIME = 120.0  # seconds for vmgr report


@dataclass(frozen=True)
class PointResult:
    """The result of an ended job: its numbers by name, and the kernel, host and CPU (``machine``).

    ``begun`` is a Unix time. A non-empty ``reason`` means that the point failed.
    """

    values: Mapping[str, float]
    begun: float
    machine: str
    reason: str


class Collector:
    """A reader of the files of ended jobs.

    ``report`` saves a job's report in the point's directory, or returns why this failed.
    """

    def __init__(self, definition: Definition, report: Callable[[str, Path], str]) -> None:
        self._definition, self._report = definition, report

    def collect_end(self, row: PointRow, point: Path, bare: bool) -> PointResult:
        """Return the result of a point whose job has ended. Invalid files make the point fail."""
        try:
            code, start, stop = read_tail(point, wrapper.ENDED, _SHORT).split()
            begun = float(read_tail(point, wrapper.BEGUN, _SHORT).split()[-2])
            values = {"code": float(int(code)), "wall": max(0.0, float(stop) - float(start))}
        except (OSError, ValueError, IndexError) as error:
            return PointResult({}, 0.0, "", printable(f"{point / wrapper.ENDED}: {error}", 300))
        if row.submitted is not None:
            values["wait"] = max(0.0, begun - row.submitted)
        kept = row.begun is not None and (point / take.REPORT).exists()  # by an earlier call
        asked = self._definition.report and not bare and not kept
        said = self._report(row.job, point) if asked else ""
        problems = []
        if int(code) not in self._definition.exit_codes:
            last = _last_words(point)
            problems.append(f"exit code {int(code)}{(f': {last}' if last else '')}")
        for each in self._definition.takes:
            if bare and each.report is not None:
                continue  # no guest, no report
            try:
                values[each.name] = take.number(each, point)
            except take.MissingNumber as error:
                problems.append(f"{error}{f' ({said})' if said and each.report else ''}")
        return PointResult(values, begun, _machine(point, bare), "; ".join(problems))


def _last_words(point: Path) -> str:
    try:
        lines = read_tail(point, wrapper.STDERR, _SHORT).split("\n")
    except OSError:
        return ""
    said = [line.strip() for line in lines if line.strip()]
    return printable(said[-1], 200) if said else ""


def _machine(point: Path, bare: bool) -> str:
    try:
        text = read_tail(point, wrapper.MACHINE, _SHORT)
    except OSError:
        return ""
    said = [text, *(batch.tail(point, name, 4096) for name in (batch.VSUB_ERR, batch.JOB_ERR))]
    emulated = not bare and any(sign in each for sign in _SIGNS for each in said)
    machine = printable(", ".join(line.strip() for line in text.splitlines()), 280)
    return f"{machine}, {EMULATED}" if emulated else machine


def reporter(config: Path) -> Callable[[str, Path], str]:
    """Return the function ``report`` for a :class:`Collector`. It calls ``vmgr report``."""

    def keep(job: str, point: Path) -> str:
        if not batch.is_job_id(job):
            return "the point has no job"
        try:
            done = subprocess.run(
                service.vmgr(config, "report", "--json", job), stdin=subprocess.DEVNULL,
                capture_output=True, timeout=REPORT_TIME, check=False,
            )  # fmt: skip
        except (OSError, subprocess.TimeoutExpired) as error:
            return printable(f"vmgr report: {error}", 300)
        if done.returncode or len(done.stdout) > MAX_REPORT:
            said = done.stderr.decode("utf-8", "replace").strip().split("\n")[-1]
            return printable(said, 300) or f"vmgr report ended with exit code {done.returncode}"
        try:
            files.write(
                point.parents[2], *point.parts[-3:], take.REPORT, content=done.stdout
            )  # fmt: skip
        except OSError as error:
            return printable(f"{point / take.REPORT}: {error.strerror}", 300)
        return ""

    return keep
