"""Release the resources in a journal in reverse order. As root, in epilogue and reaper.

Needs only the journal: no plan, site config or batch system.

1. Plugins in the journal run ``vtorque_teardown``.
2. A record is released after all later records of its guest and of the whole job. A guest's leases
   are released last. Records of different guests are released in parallel, and so are the core's
   processes and packet filters of a guest. Later records of the whole node do not delay an earlier
   record, unless they need it. Plugin code and blocking releases run in a child with a
   time limit.
3. If the release of a record fails, the record and the records that it needs stay open.
4. When no record is open, the journal is deleted.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from vtorque_core.api import hooks, kept_records
from vtorque_core.api.acquired import CoreResource, Resource
from vtorque_core.api.children import Child, run_in_child, wait_any
from vtorque_core.api.node_job import EndedJob
from vtorque_core.api.vcpu_threads import process_of
from vtorque_core.base import hypervisor
from vtorque_core.base.distributions import how_to_get, how_to_install
from vtorque_core.base.errors import HostFault, VtorqueError
from vtorque_core.base.locks import Busy, job_lock, node_lock
from vtorque_core.base.names import Paths, boot_id
from vtorque_core.config.plugins import Plugins
from vtorque_core.node.shell import proof
from vtorque_core.records import console, log, reading, timeline
from vtorque_core.records import journal as journal_module
from vtorque_core.records.journal import Journal, shared_records
from vtorque_core.resources.kinds import HELPERS, core_kind

RELEASE_TIMEOUT = 30.0  # seconds for one record; the default of [node] release_timeout
DEADLINE = 60.0  # seconds for all; the default of [node] teardown_timeout
ENDS = "spare ends"  # journal phase: no job may claim the warm guest any more
_MOST = 16  # children at the same time
_LOOK_AGAIN = 0.1  # seconds
_THREADS_END = 1.0  # seconds; a thread that runs longer is assumed to hang in a call to libvirtd
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReleaseResult:
    """Result of releasing one record. ``message``: why the record is still open, and what to do."""

    seq: int
    kind: str
    plugin: str
    guest: int | None
    message: str = ""


@dataclass
class TeardownReport:
    """Result of one teardown.

    Attributes:
        held: records that stay open because an open record needs them.
        orphaned: records whose kind no loaded plugin knows.
        notes: problems that did not prevent the release of any resource.
        usage: CPU time and memory of the guests that still ran when the first teardown began.
        ended: the job if everything is released, otherwise None.
    """

    job: str
    journal: str
    released: list[ReleaseResult] = field(default_factory=list)
    held: list[ReleaseResult] = field(default_factory=list)
    failed: list[ReleaseResult] = field(default_factory=list)
    orphaned: list[ReleaseResult] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    usage: kept_records.Usage | None = None
    ended: reading.JobHeader | None = None

    @property
    def clean(self) -> bool:
        return not (self.held or self.failed or self.orphaned)

    def lines(self) -> list[str]:
        lines = [f"{self.job}: {note}" for note in self.notes]
        for word, outcomes in (("failed", self.failed), ("orphaned", self.orphaned)):
            lines += [f"{self.job}:{o.seq} {o.kind} {word}: {o.message}" for o in outcomes]
        if self.held:
            held = ", ".join(f"{o.seq} {o.kind}" for o in self.held)
            lines.append(f"{self.job}: held until the above is released: {held}")
        return lines


def plugins_of(state: reading.JournalState) -> Plugins:
    wanted = frozenset(state.header.plugins)
    if state.header.ending is not None:  # loading all takes four times as long
        wanted &= {*state.header.ending, *(record.plugin for record in state.open)}
    return Plugins.load(node=True, only=wanted)


def release_job(
    paths: Paths,
    job_id: str,
    *,
    plugins_for: Callable[[reading.JournalState], Plugins] = plugins_of,
    release_timeout: float = RELEASE_TIMEOUT,
    deadline: float = DEADLINE,
) -> list[TeardownReport]:
    """Release the resources of all attempts of a job on this node, and remove its proof."""
    reports = []
    with job_lock(paths, job_id, deadline):
        for path in reading.journals(paths, job_id):
            state = reading.try_read(path)
            plugins = plugins_for(state) if state else Plugins()
            reports.append(
                teardown(path, paths, plugins, release_timeout=release_timeout, deadline=deadline)
            )
        proof.remove(paths, job_id)
    return reports


def teardown(
    journal_path: Path,
    paths: Paths,
    plugins: Plugins,
    *,
    release_timeout: float = RELEASE_TIMEOUT,
    deadline: float = DEADLINE,
    abandon: Collection[int] = (),
    keep: str = "",
) -> TeardownReport:
    """Release all resources in the journal, and then delete the journal.

    Acquires the job's lock unless this process holds it. Forks, so no other thread may run.

    ``release_timeout``: seconds for one record. ``deadline``: seconds for all. ``abandon`` has
    numbers of records that are only marked as released. ``keep`` is the path of a file that is not
    removed; then the journal stays.
    """
    end = time.monotonic() + deadline
    with job_lock(paths, reading.lock_name(journal_path), deadline):
        if (state := reading.try_read(journal_path)) is None:
            journal_path.unlink(missing_ok=True)
            return TeardownReport(reading.lock_name(journal_path), str(journal_path))
        _drop_connections()
        with (
            log.open_log(log.teardown_log(paths, state.header.job)) as told,
            Journal.open(paths, journal_path) as journal,
        ):
            run = _Teardown(state, journal, paths, plugins, release_timeout, end)
            run.abandon(abandon)
            run.keep(keep)
            run.collect_usage(told)
            run.release_all()
            report = run.report
            for line in report.lines():
                _log.warning("%s", line)
            _log.info("%d resources released", len(report.released))
            if report.clean and not keep:
                timeline.log_durations(reading.read(journal_path), time.time())
                journal.delete()
                report.ended = None if state.header.spare else state.header
        if report.clean and state.header.spare:  # no user's, so nobody will read it
            kept_records.remove(kept_records.place(paths, state.header.job))
        return report


def end_spare(paths: Paths, key: str, seconds: float = RELEASE_TIMEOUT) -> None:
    """Tear down a warm guest, even if a job has claimed it. Raises HostFault if records remain."""
    path = paths.journal / f"{key}.jsonl"
    report = teardown(path, paths, Plugins(), release_timeout=seconds, deadline=seconds)
    if not report.clean:
        raise HostFault("; ".join(report.lines()))


def retire_spare(paths: Paths, key: str) -> bool:
    """Make a warm guest unclaimable and return True, or return False if a job has claimed it.

    The caller holds the lock of the guest's journal. Raises JournalError if any job's journal is
    unreadable, because that job may have claimed the guest.
    """
    path = paths.journal / f"{key}.jsonl"
    with node_lock(paths):
        if all(state.key != key for state in reading.idle_spares(list(reading.walk(paths)))):
            return not path.exists()
        with Journal.open(paths, path) as journal:
            journal.phase(ENDS)
    return True


@dataclass
class _Teardown:
    state: reading.JournalState
    journal: Journal
    paths: Paths
    plugins: Plugins
    release_timeout: float
    end: float
    running: dict[int, Child] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.open: dict[int, reading.Record] = {r.seq: r for r in self.state.open}
        self.pending: dict[int, reading.Record] = dict(self.open)
        self.same_boot = self.state.header.boot == boot_id()
        self.report = TeardownReport(self.state.header.job.id, str(self.journal.path))
        self._is_locked = False  # True while this teardown holds the node's lock

    @functools.cached_property
    def kinds(self) -> dict[str, type[Resource]]:
        """The plugins' resource kinds. They are imported while the guests end."""
        found: dict[str, type[Resource]] = {}
        for each in self.plugins.each(hooks.vtorque_resources):
            if each.error is not None:
                self.report.notes.append(f"plugin {each.plugin}: {each.error}")
            else:
                found[each.item.kind] = each.item
        return found

    def time_left(self) -> float:
        return min(self.release_timeout, max(0.0, self.end - time.monotonic()))

    def abandon(self, seqs: Collection[int]) -> None:
        for seq in seqs:
            if seq in self.open:
                self.journal.released(seq, abandoned=True)
                self.report.notes.append(f"{seq} {self.open[seq].kind} abandoned without release")
                del self.open[seq], self.pending[seq]

    def keep(self, path: str) -> None:
        for record in list(self.open.values()):
            if path and record.args.get("path") == path:
                del self.open[record.seq], self.pending[record.seq]

    # -- 1. usage, consoles, vtorque_teardown -------------------------------------------------

    def collect_usage(self, told: log.Log) -> None:
        if any(mark.name == "release" for mark in self.state.phases):
            log.enter("release")
            return
        self.enter("teardown")
        guests = [record for record in self.open.values() if record.kind == reading.DOMAIN]
        used = [self._measure_usage(record) for record in guests]
        self.report.usage = total_usage(used)
        gone = {g.guest for g, its in zip(guests, used, strict=True) if its is None}
        console.collect(told.place, self.state, gone)
        header = self.state.header
        ended = EndedJob(header.job, self.state.guests, self.paths)
        for name in self.plugins.names:
            if name not in header.plugins or "vtorque_teardown" not in self.plugins.hooks_of(name):
                continue
            call = self.plugins.only_plugin(name).collect
            look = functools.partial(call, hooks.vtorque_teardown, job=ended)
            if error := run_in_child(look, self.time_left()):
                self.report.notes.append(f"plugin {name}, vtorque_teardown: {error}")
        self.enter("release")

    def enter(self, phase: str) -> None:
        self.journal.phase(phase)
        log.enter(phase)
        _log.debug("begins")

    def _measure_usage(self, record: reading.Record) -> kept_records.Usage | None:
        name, uuid = str(record.args["name"]), str(record.args["uuid"])
        used = guest_usage(name, uuid)
        if used is not None:
            self.journal.phase("used", record.guest, used)
        return used

    # -- 2. and 3. release or hold ------------------------------------------------------------

    def release_all(self) -> None:
        with contextlib.ExitStack() as self.node_lock:
            while self.pending or self.running:
                self._start_all("job")
                self._start_all("node")
                if self._is_locked and not any(self.open[n].scope == "node" for n in self.running):
                    self.node_lock.close()
                    self._is_locked = False
                with contextlib.suppress(ImportError, AttributeError):
                    for record in self.pending.values():
                        core_kind(record.kind)  # import its class while the guests end
                wait_any(list(self.running.values()))
                for seq, child in list(self.running.items()):
                    if child.check():
                        del self.running[seq]
                        self._finish_record(self.open[seq], child.error or "")

    def _start_all(self, scope: str) -> None:
        for seq, record in sorted(self.pending.items(), reverse=True):
            if record.scope == scope and self._may_start(record):
                self._start(self.pending.pop(seq))

    def _may_start(self, record: reading.Record) -> bool:
        if len(self.running) >= _MOST:
            return False
        for other in (self.open[seq] for seq in (*self.pending, *self.running)):
            together = None in (record.guest, other.guest) or record.guest == other.guest
            if reading.LEASE in (record.kind, other.kind) and record.kind != other.kind:
                if record.kind == reading.LEASE and together:
                    return False  # also leases acquired while the guest ran
                continue
            apart = {record.kind, other.kind} <= HELPERS
            apart = apart and record.plugin == other.plugin == reading.CORE
            apart = apart or (other.scope == "node" and record.scope == "job")
            if other.seq > record.seq and ((together and not apart) or record.seq in other.needs):
                return False
        return True

    def _start(self, record: reading.Record) -> None:
        holders = sorted(r.seq for r in self.open.values() if _needs(r, record))
        if holders:
            message = f"needed by {', '.join(str(seq) for seq in holders)}"
            self.report.held.append(_result(record, message))
            return
        try:
            kind = core_kind(record.kind) or self.kinds.get(record.kind)
            resource = reading.reconstruct(record, kind)
        except (reading.OrphanError, ImportError, AttributeError) as error:
            # The last two: another version was installed while this process ran.
            self.report.orphaned.append(_result(record, f"{error}: {self._advice(record)}"))
            return
        if resource.volatile and not self.same_boot:
            self._mark_released(record)
        elif self.time_left() <= 0:
            self._mark_failed(record, "not tried: teardown_timeout exceeded")
        elif record.scope == "node":
            self._release_shared(record, resource)
        else:
            self._release(record, resource)

    def _release(self, record: reading.Record, resource: Resource) -> None:
        journal_module.step(f"before release {record.kind}")
        if isinstance(resource, CoreResource) and not resource.blocking:
            self._finish_record(record, _error_of(resource.release))
            return
        release = resource.release
        if record.kind == reading.SPARE:
            key = str(record.args["key"])
            release = functools.partial(end_spare, self.paths, key, self.release_timeout)
        elif isinstance(resource, CoreResource) and not record.created:
            release = functools.partial(
                _retry_release, release, resource.retry_seconds - _age(record)
            )
        try:
            self.running[record.seq] = Child(release, self.time_left())
        except OSError as error:
            self._mark_failed(record, f"cannot fork: {error.strerror}")

    def _release_shared(self, record: reading.Record, resource: Resource) -> None:
        """Release a record of the whole node, unless another job has the same record.

        Holds the node's lock until the record is marked as released. If the lock is held elsewhere,
        first waits for what this teardown releases meanwhile.
        """
        try:
            if not self._is_locked:
                wait = 0.0 if self.running else self.time_left()
                self.node_lock.enter_context(node_lock(self.paths, wait))
                self._is_locked = True
            own = (self.journal.path, record.seq)
            if shared_records(self.paths, record.kind, record.args, but=own):
                self._mark_released(record)
            else:
                self._release(record, resource)
        except VtorqueError as error:
            if isinstance(error, Busy) and self.running:
                self.pending[record.seq] = record
            else:
                self._mark_failed(record, str(error))

    def _finish_record(self, record: reading.Record, error: str) -> None:
        if error:
            self._mark_failed(record, error)
            return
        journal_module.step(f"after release {record.kind}")
        self._mark_released(record)

    def _mark_released(self, record: reading.Record) -> None:
        journal_module.step(f"before released {record.kind}")
        self.journal.released(record.seq)
        journal_module.step(f"after released {record.kind}")
        self.open.pop(record.seq)
        self.report.released.append(_result(record))

    def _mark_failed(self, record: reading.Record, error: str) -> None:
        tries = record.tries + 1
        self.journal.failed(record.seq, error, tries)
        self.report.failed.append(_result(record, f"{error} (try {tries})"))

    def _advice(self, record: reading.Record) -> str:
        header = self.state.header
        known = {**header.plugins, reading.CORE: f"vtorque-core {header.core}"}
        name, _, version = known.get(record.plugin, "").partition(" ")
        how = how_to_install(name, version) if name else how_to_get(record.plugin)
        broken = self.plugins.broken.get(record.plugin)
        why = f"plugin {record.plugin} cannot be loaded ({broken}); " if broken else ""
        retry, give_up = f"vtorque reap {header.job.id}", f"vtorque reap --abandon {header.job.id}"
        return f"{why}{how}, then {retry}; or {give_up}:{record.seq}"


def _needs(record: reading.Record, other: reading.Record) -> bool:
    later = (
        record.kind == reading.DOMAIN
        and other.kind == reading.LEASE
        and record.guest == other.guest
    )
    return later or other.seq in record.needs


def _result(record: reading.Record, message: str = "") -> ReleaseResult:
    return ReleaseResult(record.seq, record.kind, record.plugin, record.guest, message)


def _drop_connections() -> None:
    """Close libvirt connections before a fork, and wait for the threads that used them.

    A finished Python thread may still hold a lock of a C library, which the child could never
    acquire.
    """
    hypervisor.close()
    end = time.monotonic() + _THREADS_END
    while len(os.listdir("/proc/self/task")) > 1 and time.monotonic() < end:  # noqa: PTH208
        time.sleep(0.001)


def _age(record: reading.Record) -> float:
    return max(0.0, time.monotonic() - record.clock if record.clock else time.time() - record.time)


def _retry_release(release: Callable[[], None], seconds: float) -> None:
    """Repeat a release: libvirtd may create the resource after the start was killed."""
    end = time.monotonic() + seconds
    release()
    while time.monotonic() < end:
        time.sleep(_LOOK_AGAIN)
        release()


def _error_of(release: Callable[[], None]) -> str:
    try:
        release()
    except HostFault as error:
        return str(error) or "HostFault"
    except Exception as error:  # a bug in one kind must not block the others
        return f"{type(error).__name__}: {error}"
    return ""


def guest_usage(name: str, uuid: str) -> kept_records.Usage | None:
    process = process_of(name, uuid)
    if process is None:
        return None
    try:
        after_name = (process / "stat").read_text(encoding="utf-8", errors="replace")
        fields = after_name.rpartition(")")[2].split()
        ticks = int(fields[11]) + int(fields[12])  # utime, stime: proc_pid_stat(5)
        status = (process / "status").read_text(encoding="utf-8", errors="replace")
        peak = next(line for line in status.splitlines() if line.startswith("VmHWM:"))
        return kept_records.Usage(ticks / os.sysconf("SC_CLK_TCK"), int(peak.split()[1]) >> 10)
    except (OSError, ValueError, IndexError, StopIteration):
        return None


def total_usage(parts: Iterable[kept_records.Usage | None]) -> kept_records.Usage | None:
    known = [part for part in parts if part is not None]
    if not known:
        return None
    return kept_records.Usage(sum(p.cpu_seconds for p in known), sum(p.peak_mib for p in known))
