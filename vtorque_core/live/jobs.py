"""Public, for a plugin's node-wide process: what runs on this node now, whose it is, its counters.

Such a process is started by a ``scope="node"`` resource: root, no plan. All it needs stands in the
journals, in what is kept of the jobs, and in libvirt. Nothing here changes anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vtorque_core import hypervisor
from vtorque_core.api_ledger import journal_events
from vtorque_core.api_telemetry import Exporter
from vtorque_core.config import Site, build, plugins_config, read_toml
from vtorque_core.errors import printable
from vtorque_core.kept import Place, place
from vtorque_core.ledger import CORE
from vtorque_core.names import Paths, job_key
from vtorque_core.plugins import Plugins
from vtorque_core.records import (
    DOMAIN,
    EmptyJournal,
    JournalError,
    JournalState,
    Record,
    journals,
    read,
)
from vtorque_core.usage import process_of

__all__ = [
    "Exporters",
    "Paths",
    "Place",
    "Running",
    "RunningGuest",
    "RunningJob",
    "domain_stats",
    "exporters",
    "job_key",
    "journal_events",
    "process_of",
]

_STATS = 1 << 2 | 1 << 3 | 1 << 4 | 1 << 5  # balloon, vCPUs, interfaces, blocks
_ACTIVE = 1 << 0  # virConnectGetAllDomainStatsFlags
_NOWAIT = 1 << 29  # a domain with a call in hand is left out instead of waited for


@dataclass(frozen=True)
class RunningGuest:
    """A guest whose domain has been started.

    Args:
        index: on this node, from 0; ``rank`` in the whole job.
        name, uuid, uri: its libvirt domain and where.
        vcpus, ram_mib: what it was given; 0 if that is not known.
        io_cores: how many host cores its I/O has alone now.
        started, ready: Unix time of its boot, and of its readiness (None: not ready yet).
        run_dir: its root-owned directory in memory, with its sockets.
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
    """A job attempt with something acquired on this node, also while it starts or ends.

    ``key`` names it in directories; ``node`` is the batch system's name of this node, empty if
    not known; ``phases``: name and Unix time, the last one is not over; ``kept``: its place.
    """

    id: str
    key: str
    attempt: int
    owner: str
    uid: int
    node: str
    guests: tuple[RunningGuest, ...]
    phases: tuple[tuple[str, float], ...]
    kept: Place

    def spans(self, now: float) -> dict[str, float]:
        """Return the seconds of each phase, the last one until ``now`` (Unix time)."""
        ends = [*(at for _, at in self.phases[1:]), now]
        found: dict[str, float] = {}
        for (name, at), end in zip(self.phases, ends, strict=True):
            found[name] = found.get(name, 0.0) + max(0.0, end - at)
        return found


class Running:
    """The jobs of this node; only the journals that have changed are read again."""

    def __init__(self, paths: Paths) -> None:
        self._paths = paths
        self._known: dict[Path, tuple[tuple[int, int], RunningJob | None]] = {}

    def jobs(self) -> list[RunningJob]:
        """Return all jobs, as root. A journal that cannot be read is left out (doctor tells)."""
        now: dict[Path, tuple[tuple[int, int], RunningJob | None]] = {}
        for path in journals(self._paths):
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
            state = read(path)
            return self._job(state)
        except (EmptyJournal, JournalError, ArithmeticError, LookupError, TypeError, ValueError):
            return None

    def _job(self, state: JournalState) -> RunningJob:
        header = state.header
        kept = place(self._paths, header.uid, header.id, header.attempt)
        facts = kept.facts()
        marks = tuple((m.name, m.time) for m in state.phases if m.guest is None)
        return RunningJob(
            id=header.id,
            key=state.key,
            attempt=header.attempt,
            owner=header.owner,
            uid=header.uid,
            node=str(facts.get("node", "")),
            guests=tuple(self._guests(state, facts)),
            phases=marks,
            kept=kept,
        )

    def _guests(self, state: JournalState, facts: Mapping[str, Any]) -> list[RunningGuest]:
        given = {g.get("domain"): g for g in facts.get("guests", ()) if isinstance(g, dict)}
        domains = [r for r in state.open if r.kind == DOMAIN and r.created]
        return [self._guest(state, r, given.get(r.args["name"], {})) for r in domains]

    def _guest(self, state: JournalState, domain: Record, given: Mapping[str, Any]) -> RunningGuest:
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
            io_cores=sum(a["pool"] == CORE and a.get("use") == "io" for a in leases),
            started=domain.time,
            ready=ready[-1] if ready else None,
            run_dir=self._paths.job_run(state.key) / f"g{index}",
        )


def domain_stats(uri: str, timeout: float = 1.0) -> dict[str, dict[str, Any]]:
    """Return UUID to what ``virsh domstats`` shows (vCPU, balloon, interface, block), in one call.

    All running domains of the node, vTorque's or not. A domain that somebody else's call waits for
    has less. Raises HostFault after ``timeout`` seconds: a guest can have its QEMU not answer; the
    next call leaves that one out, since this one still waits for it.
    """

    def work(connection: Any) -> dict[str, dict[str, Any]]:
        found = connection.getAllDomainStats(_STATS, _ACTIVE | _NOWAIT)
        return {domain.UUIDString(): stats for domain, stats in found}

    return hypervisor.call(uri, "counters of all guests", work, timeout)


@dataclass(frozen=True)
class Exporters:
    """The site, every plugin's exporters by name, and what is wrong with the others."""

    site: Site
    found: Mapping[str, Exporter]
    wrong: tuple[str, ...]


def exporters(config: Path) -> Exporters:
    """Load the site config and its plugins; ask all for ``vtorque_exporters``. As root.

    Raises ConfigError, Conflict.
    """
    raw = read_toml(config)
    wanted = plugins_config(raw)
    plugins = Plugins.load(node=True, enable=wanted.enable, disable=wanted.disable)
    site = build(raw, plugins, node=True)
    answer = Exporters(site, {}, ())
    for each in plugins.each("vtorque_exporters"):
        wrong = f"{type(each.error).__name__}: {each.error}" if each.error else ""
        if not wrong and not isinstance(each.item, Exporter):
            wrong = "gives no Exporter"
        if not wrong and each.item.name in answer.found:
            wrong = f"exporter {each.item.name} is there twice"
        if wrong:
            text = printable(f"plugin {each.plugin} ({each.distribution}): {wrong}")
            answer = replace(answer, wrong=(*answer.wrong, text))
        else:
            answer = replace(answer, found={**answer.found, each.item.name: each.item})
    return answer
