"""List the jobs of this node with their guests and counters.

Privileges: root.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vtorque_core.api.kept_records import Place, place
from vtorque_core.base.names import JobAttempt, Paths
from vtorque_core.records import reading


@dataclass(frozen=True)
class RunningGuest:
    """A guest with a started domain.

    Attributes:
        index: number on this node, from 0.
        rank: number in the job, from 0.
        vcpus, ram_mib: 0 if unknown.
        io_cores: number of exclusive host CPUs for I/O.
        started: Unix time of its boot.
        ready: Unix time of READY; None: not ready yet.
        run_dir: root-owned directory in memory with its sockets.
    """

    index: int
    rank: int
    hostname: str
    name: str
    uuid: str
    uri: str
    vcpus: int
    ram_mib: int
    io_cores: int
    started: float
    ready: float | None
    run_dir: Path


@dataclass(frozen=True)
class RunningJob:
    """A job attempt that holds resources on this node, also while it starts or ends.

    Attributes:
        job: the attempt. ``job.node`` is empty if unknown.
        phases: (name, Unix time) of each phase, the current phase last.
    """

    job: JobAttempt
    guests: tuple[RunningGuest, ...]
    phases: tuple[tuple[str, float], ...]
    kept: Place


class RunningJobs:
    """A reader of this node's journals, which parses a journal again only after a change."""

    def __init__(self, paths: Paths) -> None:
        self._paths = paths
        self._known: dict[Path, tuple[tuple[int, int], RunningJob | None]] = {}

    def jobs(self) -> list[RunningJob]:
        """Return all jobs with a readable journal."""
        now: dict[Path, tuple[tuple[int, int], RunningJob | None]] = {}
        for path in reading.journals(self._paths):
            try:
                info = path.stat()
                mark = (info.st_size, info.st_mtime_ns)
                known = self._known.get(path)
                now[path] = known if known and known[0] == mark else (mark, self._read(path))
            except FileNotFoundError:
                continue
        self._known = now
        return [job for _, job in now.values() if job is not None]

    def _read(self, path: Path) -> RunningJob | None:
        try:
            state = reading.read(path)
            return None if state.header.spare else self._job(state)
        except (reading.JournalError, ArithmeticError, LookupError, TypeError, ValueError):
            return None

    def _job(self, state: reading.JournalState) -> RunningJob:
        kept = place(self._paths, state.header.job)
        facts = kept.facts()
        given = {g.get("domain"): g for g in facts.get("guests", ()) if isinstance(g, dict)}
        domains = [r for r in state.open if r.kind == reading.DOMAIN and r.created]
        return RunningJob(
            dataclasses.replace(state.header.job, node=str(facts.get("node", ""))),
            tuple(self._guest(state, r, given.get(r.args["name"], {})) for r in domains),
            tuple((m.name, m.time) for m in state.phases if m.guest is None),
            kept,
        )

    def _guest(
        self, state: reading.JournalState, domain: reading.Record, given: Mapping[str, Any]
    ) -> RunningGuest:
        index = domain.guest or 0
        ready = [m.time for m in state.phases if m.guest == domain.guest and m.name == "ready"]
        leases = (r.args for r in state.leases if r.guest == domain.guest)
        return RunningGuest(
            index=index,
            rank=int(given.get("rank", index)),
            hostname=str(given.get("hostname", "")),
            name=str(domain.args["name"]),
            uuid=str(domain.args["uuid"]),
            uri=str(domain.args["uri"]),
            vcpus=int(given.get("vcpus", 0)),
            ram_mib=int(given.get("ram_mib", 0)),
            io_cores=sum(a["pool"] == reading.CORES and a.get("use") == "io" for a in leases),
            started=domain.time,
            ready=ready[-1] if ready else None,
            run_dir=self._paths.job_run(state.key) / f"g{index}",
        )
