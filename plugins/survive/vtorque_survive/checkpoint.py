"""Save a job's guests to files. Runs as root, in the watcher.

The steps of a checkpoint, each in a separate process:

1. Let the script's guest and the job shell survive the loss of their connection (:func:`_hold`).
2. Pause the guests, copy the disks, save the memory, and sync all files (:func:`_save`). If the job
   continues, also save the state of the job shell's session with the guest, and resume the guests.
   If the job must end, wait until all guests are saved, then end the first guest, which runs the
   script. The job shell detects the guest's end and writes the session's state.
3. If the job must end, notify the requester, then end the job (:func:`_end`).

A file in the job's state directory names the requested checkpoint, so a new watcher can continue if
a watcher was killed. Each step is idempotent. Memory that libvirt saved before a process was killed
is not saved again. A failed checkpoint is not retried: the job continues, or ends if a guest has
ended.

A multi-node job is saved by the watchers of all nodes (:mod:`vtorque_survive.node_parts`). No node
saves memory before all guests are paused.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Self

from vtorque_core.api import HostFault, Paths, Refused, VtorqueError, name_errors, replace_file
from vtorque_core.api.children import Child, run_in_child, wait_readable
from vtorque_core.api.guest_driver import LEAVE, TELL
from vtorque_core.live import libvirt, service, suspend
from vtorque_core.live.jobs import RunningGuest, RunningJob
from vtorque_survive import domains, listing, periodic, room, saving, session, tools
from vtorque_survive.clocks import set_clocks
from vtorque_survive.node_parts import DONE, STILL, NodePart, RequestReader, is_leader, nodes_of
from vtorque_survive.saving import GuestData
from vtorque_survive.settings import Settings
from vtorque_survive.shared_store import require_private
from vtorque_survive.sparse import copy_data
from vtorque_survive.stored import SESSION, Manifest, Store, manifest_of

ASKED, HELD = "checkpoint-asked", "checkpoint-held"  # files in the job's state directory
_LOOKS = 10.0  # seconds to examine the user's disk files
_HELD = 20.0  # seconds for a guest to confirm that its job shell may disconnect
_TIME = 3600.0  # seconds for a whole checkpoint
_SAYS = 20.0  # seconds for the first node to report which nodes are late
_GONE, _TELLS = 10.0, 1.0  # seconds for the requester to exit, then for the batch system to notice
_ENDS = 120.0  # seconds for the batch system to end the job
_FIRST, _SLOWEST = 60.0, 10.0  # memory may take this many seconds, plus its MiB at this rate
_ANSWERS = 60.0  # seconds until the guests of all nodes are paused
HOLDS, SAVES, ENDS = "holds", "saves", "ends"
"""The three steps of a checkpoint. The last one ends the saved job."""
SAVED = "the job is being saved"

log = logging.getLogger(__name__)

on_step: Callable[[str], None] = lambda _step: None  # noqa: E731
"""For tests only: called with the name of the next or the completed step."""


@dataclass(frozen=True)
class CheckpointWatcher:
    """The part of the watcher that requests and writes checkpoints."""

    config: Path = Path()
    settings: Settings = field(default_factory=Settings)

    def find_request(self, paths: Paths, job: RunningJob) -> SaveTask | None:
        """Return the request for a checkpoint of this job, or None."""
        return SaveTask.read(paths, job)

    def request_due(self, paths: Paths, job: RunningJob) -> None:
        """Request a checkpoint if a periodic one is due, or if the first node has requested one."""
        if not is_leader(job):
            found = self._lookout.find_request(job)
            if found and self.find_request(paths, job) is None:
                SaveTask(*found).write(paths, job)
            return
        ends = periodic.is_due(paths, job, self.settings)
        if ends is None or self.find_request(paths, job):
            return
        if why := self.refusal(job, ends=ends):
            log.warning("%s cannot be saved: %s", job.job.id, why)
        else:
            self.request(paths, job, ends=ends)
        periodic.record_attempt(paths, job)  # last: if killed before, request it again

    @cached_property
    def _lookout(self) -> RequestReader:
        return RequestReader(self.settings)

    def request(self, paths: Paths, job: RunningJob, *, ends: bool) -> None:
        """Request a checkpoint of a running job. With ``ends``, the job ends afterwards."""
        SaveTask("", ends).write(paths, job)

    def withdraw(self, paths: Paths, job: RunningJob) -> None:
        """Withdraw the request for a checkpoint of a job."""
        _request_file(paths, job).unlink(missing_ok=True)

    def refusal(self, job: RunningJob, *, ends: bool) -> str:
        """Return why the job cannot be saved, or an empty string."""
        try:
            _require(job, self.settings, ends=ends)
        except VtorqueError as error:
            return str(error)
        return ""

    def must_stay_paused(self, paths: Paths, job: RunningJob) -> bool:
        """Return whether the job is paused because a process that saved it was killed.

        The job then stays paused until a new process continues to save it.
        """
        asked = SaveTask.read(paths, job)
        still = suspend.phase(job) == suspend.PAUSED
        return still and asked is not None and _is_ready(paths, job, asked)

    def begin(self, paths: Paths, job: RunningJob, asker: int) -> tuple[str, Child] | None:
        """Start the next step of a checkpoint; return the step's name and process, or None.

        ``asker`` is the requester's pid, or 0. A saved job is ended after the requester has exited.
        """
        asked, phase = SaveTask.read(paths, job), suspend.phase(job)
        settings, config = self.settings, self.config
        waits = _is_ready(paths, job, asked) if asked else not _hold_file(paths, job).exists()
        if phase == suspend.RUNS and not waits:
            return HOLDS, Child(lambda: _hold(paths, config, job, asked, settings), 2 * _HELD)
        if phase not in (suspend.RUNS, suspend.PAUSED) or not (asked and waits):
            return None
        if asked.saved and not is_leader(job) and time.time() < _deadline(paths, job) + _ENDS:
            return None  # the first node ends the job, unless its watcher was killed
        if asked.saved:
            return ENDS, Child(lambda: _end(config, job, asker), _ENDS)
        return SAVES, Child(lambda: _save(paths, config, job, asked, settings), _TIME)


@dataclass(frozen=True)
class SaveTask:
    """A requested checkpoint.

    Attributes:
        id: The checkpoint's id; empty until :func:`_hold` chooses the id.
        ends: Whether the job ends afterwards.
        saved: Whether the job is saved already, and only has to end.
    """

    id: str
    ends: bool
    saved: bool = False

    @classmethod
    def read(cls, paths: Paths, job: RunningJob) -> Self | None:
        """Return a job's requested checkpoint; None without a request."""
        try:
            does, *name = _request_file(paths, job).read_text().split()
        except FileNotFoundError:
            return None
        return cls("".join(name), does != "stays", does == "saved")

    def write(self, paths: Paths, job: RunningJob) -> None:
        """Write the request."""
        line = f"{'saved' if self.saved else 'ends' if self.ends else 'stays'} {self.id}\n"
        replace_file(str(_request_file(paths, job)), line.encode(), mode=0o600)


def _request_file(paths: Paths, job: RunningJob) -> Path:
    return paths.job_state(job.job.key) / ASKED


def _hold_file(paths: Paths, job: RunningJob) -> Path:
    return paths.job_state(job.job.key) / HELD


def _tools(paths: Paths, job: RunningJob) -> Path:
    return paths.job_state(job.job.key) / "checkpoint-tools"


def _first_guest(job: RunningJob) -> RunningGuest:
    return min(job.guests, key=lambda guest: guest.index)


def _is_ready(paths: Paths, job: RunningJob, asked: SaveTask) -> bool:
    """Return whether the script's guest and the job shell survive a disconnect (:func:`_hold`).

    Always true on nodes without the job shell.
    """
    if not is_leader(job):
        return True
    try:
        return asked.id != "" and _hold_file(paths, job).read_text() == asked.id
    except FileNotFoundError:
        return False


class _RetryLater(HostFault):
    """Error if the job shell is stopped by a signal. The watcher retries the checkpoint."""


def _hold(
    paths: Paths, config: Path, job: RunningJob, asked: SaveTask | None, settings: Settings
) -> None:
    """Let the script's guest and the job shell survive the loss of their connection.

    Without ``asked``, undo this.
    """
    until = time.monotonic() + _HELD
    tell = _first_guest(job).run_dir / TELL
    with _cleanup(paths, job):
        if asked is None:
            tell.unlink(missing_ok=True)
        else:
            _require_time(paths, job)
            require_private(settings)
            if len(nodes_of(job)) > 1 and not service.batch_system(config)[1].knows_all_nodes:
                raise Refused("jobs on several nodes cannot be saved on this batch system")
            store = Store(Path(settings.checkpoints), job.job.uid)
            asked = replace(asked, id=_free_id(store, job, asked))
            asked.write(paths, job)
            _keep_tools(paths, job)
            _hold_file(paths, job).touch(mode=0o600)
            store.drop(asked.id)  # parts of an earlier attempt
            session.make(tell, job.job.uid)  # the job shell looks for it once the guest waits
        saving.allow_disconnect(paths, job, int(_TIME) if asked else 0, until)
        if asked is None:
            _hold_file(paths, job).unlink(missing_ok=True)
        else:
            _hold_file(paths, job).write_text(asked.id)


def _keep_tools(paths: Paths, job: RunningJob) -> None:
    said = dict(tools.tools(str(job.kept.facts().get("cpu", ""))))
    _tools(paths, job).write_text(json.dumps(said), "utf-8")


def _free_id(store: Store, job: RunningJob, asked: SaveTask) -> str:
    """Return an unused id for the next checkpoint.

    The id is the job key. A number follows if the job does not end after the checkpoint, or if the
    key is in use.
    """
    number = len(job.phases)
    name = job.job.key if asked.ends else f"{job.job.key}-{number}"
    while store.has(name):  # an earlier job with this id
        name, number = f"{job.job.key}-{number}", number + 1
    return name


@contextmanager
def _cleanup(paths: Paths, job: RunningJob, nodes: NodePart | None = None) -> Iterator[None]:
    """Withdraw the request for a checkpoint if the context raises an error.

    The request stays after :class:`_RetryLater`, and if this process is killed.
    """
    try:
        yield
    except _RetryLater:
        raise
    except Exception as error:
        _request_file(paths, job).unlink(missing_ok=True)
        raise (nodes.abandon(error) if nodes else error) from None


def _require(job: RunningJob, settings: Settings, *, ends: bool) -> None:
    if not settings.checkpoints:
        raise Refused("checkpoints are disabled ([plugin.survive] checkpoints is empty)")
    if suspend.phase(job) != suspend.RUNS:
        raise Refused("the job is suspended: resume it first")
    if not is_leader(job):
        raise Refused("this is not the job's first node: use the first node or a submit host")
    if len(nodes_of(job)) > 1 and not settings.checkpoints_shared:
        raise Refused(
            "the job's nodes do not share the checkpoints' directory ([plugin.survive] "
            "checkpoints_shared = false), so the job cannot be saved"
        )
    tools.require_saveable(job, ends=ends)


def _save(paths: Paths, config: Path, job: RunningJob, asked: SaveTask, settings: Settings) -> None:
    store = Store(Path(settings.checkpoints), job.job.uid)
    nodes = NodePart.for_job(store, asked.id, job)
    with _cleanup(paths, job, nodes), saving.hold(paths, job, suspend.phase(job)) as (_, guests):
        if not store.has(asked.id):
            try:
                _make(_Saving(paths, nodes, job, guests, asked, settings))
            except _RetryLater:
                raise
            except Exception as error:
                log.warning("the checkpoint has failed: %s", error)
                if not all(saving.has_domain(each.guest) for each in guests):
                    log.error("some guests have ended without being saved: the job is canceled")
                    _cancel(config, job)
                raise
            does = "ends" if asked.ends else "continues"
            log.info("saved as checkpoint %s; the job %s", asked.id, does)
        (guests[0].guest.run_dir / TELL).unlink(missing_ok=True)
        if is_leader(job):
            _tidy(paths, job, store, settings)
    if asked.ends:
        replace(asked, saved=True).write(paths, job)
    else:
        _request_file(paths, job).unlink(missing_ok=True)


def _end(config: Path, job: RunningJob, asker: int) -> None:
    """End a saved job. Wait first until the requester, which may run in the job, has exited."""
    with suppress(OSError):
        handle = os.pidfd_open(asker)
        wait_readable([handle], _GONE)  # the user chose the pid, so limit the wait
        time.sleep(_TELLS)
    try:
        _cancel(config, job)  # before its job shell ends, otherwise the job counts as failed
    finally:
        on_step("before leave")
        (_first_guest(job).run_dir / LEAVE).unlink(missing_ok=True)  # now the job shell may end
        on_step("after leave")


def _cancel(config: Path, job: RunningJob) -> None:
    site, batch = service.batch_system(config)
    code = batch.submitter(site).cancel(job.job.id)
    if code:
        raise HostFault(f"the job is saved, but cannot be canceled (exit code {code})")


def _tidy(paths: Paths, job: RunningJob, store: Store, settings: Settings) -> None:
    try:
        periodic.trim(paths, job, store, settings.kept_checkpoints)
        listing.publish(paths, store)
    except (OSError, VtorqueError) as error:
        log.warning("cannot remove older checkpoints: %s", error)


@dataclass(frozen=True)
class _Saving:
    paths: Paths
    nodes: NodePart
    job: RunningJob
    guests: list[GuestData]
    asked: SaveTask
    settings: Settings

    @property
    def part(self) -> Path:
        return self.nodes.store.part(self.asked.id)

    @property
    def run_dir(self) -> Path:
        """The run directory of this node's first guest.

        On the job's first node, this guest runs the script.
        """
        return self.guests[0].guest.run_dir

    @property
    def save_timeout(self) -> float:
        """The time limit in seconds for saving the guests' memory."""
        return max(_write_states(each.guest) for each in self.guests)

    def pause_deadline(self) -> float:
        """Return the Unix time until which this node keeps its guests paused for other nodes."""
        still = suspend.phase(self.job) == suspend.PAUSED
        since = self.job.phases[-1][1] if still else time.time()
        return since + _ANSWERS + self.settings.query_interval + self.save_timeout


def _make(of: _Saving) -> None:
    paths, nodes, job, ends = of.paths, of.nodes, of.job, of.asked.ends
    clocks, until = None, of.pause_deadline()
    # Do not resume guests whose job shell was stopped meanwhile, or that an earlier, killed process
    # has paused. The watcher resumes them.
    runs = suspend.phase(job) == suspend.RUNS
    try:
        if not nodes.is_written():
            manifest = _prepare(of)
            if runs:
                suspend.change_phase(paths, job, suspend.PAUSED, SAVED)
            on_step("before still")
            nodes.publish(STILL)
            answers = time.time() + _ANSWERS + of.settings.query_interval
            nodes.wait(STILL, min(until, answers), "the guests are not paused")
            on_step("after still")
            _write(of, manifest)
        if runs and not ends and not suspend.is_shell_stopped(paths, job):
            suspend.change_phase(paths, job, suspend.RUNS, "the checkpoint is complete")
            clocks = set_clocks(paths, job)
        if not ends:
            _require_time(paths, job)
        _finish(of, until)
    except _RetryLater:
        raise
    except Exception as error:
        for fifo in (TELL, LEAVE):
            (of.run_dir / fifo).unlink(missing_ok=True)
        why = nodes.abandon(error)
        if is_leader(job):
            with suppress(HostFault):
                nodes.store.drop(of.asked.id)
        raise why from None
    finally:
        if clocks is not None:
            clocks.wait()


def _write_states(guest: RunningGuest) -> float:
    return min(_TIME, _FIRST + guest.ram_mib / _SLOWEST)


def _finish(of: _Saving, until: float) -> None:
    """Sync the written files and complete the checkpoint, together with the job's other nodes."""
    nodes, part, ends = of.nodes, of.part, of.asked.ends
    if nodes.has_other_nodes:
        nodes.sync([file for each in of.guests for file in part.glob(f"g{each.guest.rank}.*")])
        if not ends:  # syncing takes a while; the guests run meanwhile
            until += of.save_timeout
        if not is_leader(of.job):
            nodes.wait_complete(until + _SAYS, until + _TIME)  # the first node names the late nodes
            return
        nodes.wait(DONE, until, "the guests were not saved in time")
    if ends:
        on_step("before end")
        nodes.end()
        libvirt.destroy_domain(of.guests[0].guest.uri, of.guests[0].guest.uuid, _HELD)
        on_step("after end")
        _save_session(of, of.run_dir / LEAVE)
    if nodes.has_other_nodes:
        nodes.store.write(nodes.full_manifest())
    on_step("before finish")
    nodes.store.finish(of.asked.id)
    on_step("after finish")


def _prepare(of: _Saving) -> Manifest:
    """Check that the job can be saved, create the checkpoint's directory, and return the manifest.

    Called before the guests are paused. Files that a killed process has written are kept.
    """
    paths, nodes, job, asked = of.paths, of.nodes, of.job, of.asked
    store = nodes.store
    on_step("before directory")
    part = nodes.make()
    on_step("after directory")
    if not is_leader(job):
        tools.require_saveable(job, ends=asked.ends)
        _keep_tools(paths, job)
    if any(saving.has_domain(each.guest) for each in of.guests):
        _require_time(paths, job)
        _inspect_disks(of.guests, lambda _: None)
    with store.hold_lock():
        room.require_few(store, job.job.id, of.settings)
        room.require_room(store, part, of.guests, of.settings)
    said = json.loads(_tools(paths, job).read_text("utf-8"))
    manifest = manifest_of(store.directory / asked.id, job, of.guests, said)
    nodes.begin(manifest.tools, ends=asked.ends)
    return manifest


def _write(of: _Saving, manifest: Manifest) -> None:
    """Write the missing files of the checkpoint, while the guests are paused."""
    guests, part = of.guests, of.part
    for each in guests:
        if each.disk is not None:
            _copy(each.disk, part / f"g{each.guest.rank}.disk")
    with ThreadPoolExecutor(len(guests)) as threads:
        work = [threads.submit(_memory, of, each) for each in guests]
        if is_leader(of.job):  # in parallel to the memory
            try:
                _ask_session(of)
            except (Refused, HostFault) as error:
                if not isinstance(error, _RetryLater):
                    for each in guests:
                        domains.abort_operation(each.guest.uri, each.guest.uuid)
                raise
    for done in work:
        done.result()
    room.require_no_more(part)
    on_step("before manifest")
    _inspect_disks(guests, lambda disks: of.nodes.write(replace(manifest, disks=disks)))
    on_step("after manifest")


def _ask_session(of: _Saving) -> None:
    """Save the job shell's session state, or prepare to save it if the checkpoint ends the job.

    If the checkpoint ends the job, :func:`_finish` saves the last state, which the job shell sends
    when the connection to the guest breaks. To prepare, check that the job shell answers, and
    create the FIFO for the last state.
    """
    tell, leave = of.run_dir / TELL, of.run_dir / LEAVE
    if not of.asked.ends:
        _save_session(of, tell)
    elif not leave.exists():
        _script_state(of.paths, of.job, tell)
        session.make(leave, of.job.job.uid)
        tell.unlink()


def _inspect_disks(guests: list[GuestData], then: Callable[[dict[str, list[int]]], None]) -> None:
    """Call ``then`` with the result of :func:`vtorque_survive.tools.disks`.

    Both functions run in a child process: if the user's file system hangs, only the child hangs.
    If no guest has a disk of the user, call ``then`` with an empty result in this process.
    """
    if not any(saving.has_user_disk(each.guest.run_dir) for each in guests):
        then({})
        return

    def inspect() -> None:
        then(tools.disks(each.guest.run_dir for each in guests))

    if wrong := run_in_child(inspect, _LOOKS):
        raise HostFault(wrong)


def _save_session(of: _Saving, fifo: Path) -> None:
    to = of.part / SESSION
    if to.exists():
        return
    on_step("before session")
    replace_file(str(to), _script_state(of.paths, of.job, fifo), mode=0o600)
    on_step("after session")


def _script_state(paths: Paths, job: RunningJob, fifo: Path) -> bytes:
    """Return the job shell's session state.

    Raises:
        _RetryLater: If the job shell was stopped.
        Refused: If the script does not run.
        HostFault: If the job shell does not answer.
    """
    try:
        return session.read_state(fifo)
    except HostFault as error:
        if suspend.is_shell_stopped(paths, job) and _has_time(paths, job):
            raise _RetryLater(f"{error}: the job shell was stopped by a signal") from None
        raise


def _require_time(paths: Paths, job: RunningJob) -> None:
    """Raise HostFault after the time limit of the checkpoint, so that retries end."""
    if not _has_time(paths, job):
        raise HostFault(f"the job could not be saved within {_TIME:g} s")


def _has_time(paths: Paths, job: RunningJob) -> bool:
    return time.time() <= _deadline(paths, job) + _TIME


def _deadline(paths: Paths, job: RunningJob) -> float:
    return _request_file(paths, job).stat().st_mtime


def _copy(disk: Path, to: Path) -> None:
    """Copy the disk of a paused guest. QEMU has flushed it."""
    if to.exists():
        return
    on_step("before disk")
    fresh = to.with_suffix(".copying")
    with name_errors(f"cannot copy {disk}"):
        source = os.open(disk, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(source, "rb") as reads, fresh.open("wb") as writes:
            fresh.chmod(0o600)
            copy_data(reads.fileno(), writes.fileno())
        fresh.rename(to)
    on_step("after disk")


def _memory(of: _Saving, each: GuestData) -> None:
    """Save a guest's memory, unless its file is already complete."""
    file = of.part / f"g{each.guest.rank}.memory"
    if saving.has_domain(each.guest) and not tools.is_whole(file):
        on_step("before memory")
        saving.save(of.paths, of.job, each.guest, file, _write_states(each.guest))
        on_step("after memory")
    if not tools.is_whole(file):
        raise HostFault(f"guest {each.guest.index} has ended without being saved")
