"""The report of a whole job, from the records of one or more nodes."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from vtorque_core.api import EXIT_GUEST_DIED, EXIT_HOST_FAULT, EXIT_REFUSED
from vtorque_report.figures import RUN, Figures, combine_figures, guest_figures
from vtorque_report.hints import hints
from vtorque_report.read import Attempt, ReportGuest
from vtorque_report.units import clock, duration, size

_SAID = {
    EXIT_GUEST_DIED: "a guest died",
    EXIT_HOST_FAULT: "a node failure",
    EXIT_REFUSED: "refused",
}


@dataclass(frozen=True)
class Report:
    """The report of one attempt to run a job.

    Attributes:
        attempts: the records of this attempt, one from each of its nodes.
        now: Unix time of the report.
    """

    attempts: tuple[Attempt, ...]
    now: float

    @property
    def first_attempt(self) -> Attempt:
        """The attempt as recorded by the job's first node."""
        return self.attempts[0]

    @cached_property
    def guests(self) -> Sequence[tuple[ReportGuest, Figures]]:
        """All guests of the job with their figures, by rank."""
        found = [(g, guest_figures(g, a, self.now)) for a in self.attempts for g in a.guests]
        return sorted(found, key=lambda each: each[0].rank)

    @cached_property
    def total(self) -> Figures:
        """The figures of all guests together."""
        return combine_figures([figures for _, figures in self.guests])

    @property
    def start(self) -> float:
        """Time when the job started on the first of its nodes, in Unix seconds."""
        return min(a.started for a in self.attempts)

    @property
    def end(self) -> float:
        """Unix time of the job's end on its last node.

        While the job runs, this is ``now``, or the time of the last sample if that is later.
        """
        ends = [self.now if a.ended is None else a.ended for a in self.attempts]
        samples = [g.lines[-1].time for a in self.attempts for g in a.guests if g.lines]
        return max([self.start, *ends, *samples])

    @property
    def times(self) -> Mapping[str, float]:
        """Seconds before, during and after the script of an ended job; otherwise empty."""
        ran = [p for a in self.attempts for p in a.phases if p.guest is None and p.name == "run"]
        if not ran or any(a.ended is None for a in self.attempts):
            return {}
        begun, over = min(p.start for p in ran), max(p.end for p in ran)
        spans = {"start": begun - self.start, "script": over - begun, "end": self.end - over}
        return {name: max(0.0, seconds) for name, seconds in spans.items()}

    @property
    def state(self) -> str:
        """The job's state as text: running, or how the job ended."""
        status = next((a.status for a in self.attempts if a.status is not None), None)
        over = all(a.ended is not None for a in self.attempts)
        if status is not None:
            said = f" ({_SAID[status]})" if status in _SAID else ""
            return f"{('ended' if over else 'script ended')}, exit code {status}{said}"
        if not over:
            return "running"
        ran = any(p.name in RUN for a in self.attempts for p in a.phases)
        return "ended" if ran else "ended before its script was started"

    @property
    def failure_reason(self) -> str:
        """Why the job did not start; empty if it started or the reason is unknown."""
        return next((a.reason for a in self.attempts if a.reason), "")

    @property
    def display_name(self) -> str:
        """The job id that users see."""
        return self.first_attempt.known_as or self.first_attempt.job

    @property
    def parts(self) -> Sequence[tuple[str, Report]]:
        """Node names with a report of each node, for table rows; empty for a single node."""
        if len(self.attempts) < 2:
            return ()
        return [(a.node, Report((a,), self.now)) for a in self.attempts]

    @property
    def length(self) -> str:
        """The job's duration as text."""
        return duration(max(0.0, self.end - self.start))

    @property
    def owner_text(self) -> str:
        """The owner, nodes, batch system and attempt as text."""
        nodes = ", ".join(a.node for a in self.attempts)
        again = f", attempt {self.first_attempt.attempt + 1}" if self.first_attempt.attempt else ""
        return f"of {self.first_attempt.owner} on {nodes} ({self.first_attempt.batch}{again})"

    @property
    def request_text(self) -> str:
        """The image, and number and size of the guests, as text."""
        kinds = {(g.vcpus, g.ram_mib) for g, _ in self.guests}
        each = [f"{v} vCPU{'s' * (v != 1)} and {size(m << 20)}" for v, m in sorted(kinds)]
        number = len(self.guests)
        guests = f"{number} guest{'s' * (number != 1)}" + (" each" * (number > 1) + " of ")
        image = f"image {self.first_attempt.image or 'unknown'}"
        return f"{image}, {guests}{' or '.join(each)}" if number else f"{image}, no guests"

    @property
    def time_text(self) -> str:
        """The start time and durations as text."""
        ran = [p for p in self.first_attempt.phases if p.guest is None and p.name == "run"]
        script = f" (script: {duration(sum(p.end - p.start for p in ran))})" if ran else ""
        began = clock(self.start)
        return f"{f'started {began}, ' if began else ''}{self.length}{script}"

    @cached_property
    def hints(self) -> Sequence[str]:
        """Hints for the next job."""
        return tuple(hints(self.first_attempt, [figures for _, figures in self.guests], self.total))

    @cached_property
    def missing_data(self) -> Sequence[str]:
        """Sentences about missing data, with the reasons."""
        told = []
        here = {a.node for a in self.attempts}
        others = [n for n in self.first_attempt.nodes if n not in here]
        if others:
            some = ", ".join(others[:4]) + (" ..." if len(others) > 4 else "")
            told.append(
                f"only {len(here)} of {len(here) + len(others)} nodes: {some} have their own "
                "records; add copies of them with --from"
            )
        unmeasured = [g for g, f in self.guests if not f.measured]
        if unmeasured and len(unmeasured) == len(self.guests):
            told.append(
                (
                    "no samples: the plugin telemetry is not enabled, or the job was too short; "
                    "disk, network and steal are unknown"
                )
                + (", CPU time includes the boot" if self.total.cpu is not None else "")
            )
        elif unmeasured:
            told.append(f"no samples of {len(unmeasured)} of {len(self.guests)} guests")
        return tuple(told)

    def data(self) -> dict[str, Any]:
        """Return the report for ``--json``, in seconds, bytes, and fractions from 0 to 1."""
        first = self.first_attempt
        return {
            "schema": 1,
            "job": first.job,
            "known_as": self.display_name,
            "name": first.name,
            "attempt": first.attempt,
            "owner": first.owner,
            "batch": first.batch,
            "nodes": [a.node for a in self.attempts],
            "image": first.image,
            "state": self.state,
            "reason": self.failure_reason,
            "status": first.status,
            "start": self.start,
            "end": self.end,
            "times": self.times,
            "total": _figures(self.total),
            "guests": [
                {"rank": g.rank, "node": g.node, "index": g.index, "hostname": g.hostname}
                | _figures(f)
                for g, f in self.guests
            ],
            "phases": [
                dataclasses.asdict(p) | {"node": a.node} for a in self.attempts for p in a.phases
            ],
            "hints": list(self.hints),
            "missing": list(self.missing_data),
        }  # fmt: skip


@dataclass(frozen=True)
class JobArray:
    """A report of one or more tasks of a job array."""

    elements: tuple[Report, ...]

    @property
    def display_name(self) -> str:
        """The array's name for users: ``22[].srv``, ``22_*``."""
        name = self.elements[0].display_name
        return re.sub(r"\[\d+\]", "[]", re.sub(r"_\d+$", "_*", name), count=1)

    @property
    def state(self) -> str:
        """The number of tasks in each state, as text."""
        states = Counter(element.state for element in self.elements)
        said = [f"{number} {state}" for state, number in states.most_common(4)]
        rest = len(states) - len(said)
        return "; ".join(said + ([f"{rest} more states"] if rest else []))

    @property
    def parts(self) -> Sequence[tuple[str, Report]]:
        """The reports of the array's tasks by number, each with the job id that users see."""
        found = [(element.display_name, element) for element in self.elements]
        return sorted(found, key=lambda each: (len(each[0]), each[0]))

    def data(self) -> dict[str, Any]:
        """Return the reports of all tasks for ``--json``."""
        elements = [element.data() for _, element in self.parts]
        return {"schema": 1, "array": self.display_name, "elements": elements}


def _figures(figures: Figures) -> dict[str, Any]:
    return dataclasses.asdict(figures) | {
        "busy": figures.cpu_share,
        "stolen": figures.steal_share,
        "beside": figures.overhead_share,
        "memory_share": figures.memory_share,
    }
