"""``vmgr migrate``: live-migrate a job's guests to another node. Runs as root, on the source node.

Exactly one node owns a guest: the destination once the guest runs there, otherwise the source. To
recover from an interrupted migration, :func:`resolve` waits until the local libvirt has finished,
then asks the destination. These rules apply:

- The source ends its paused guest if the guest runs on the destination, and resumes it if the
  destination has no such guest. While the destination does not answer, the guest stays paused.
- If one guest fails to migrate, the remaining ones are not sent. Guests that have already migrated
  stay on the destination, and the job keeps both nodes.
- Exception to the first rule: a guest with its own disk. The source pauses this guest before
  libvirt sends it. The destination resumes the guest only after the source has reported that it no
  longer has the guest. Therefore, if the migration fails and the source still has the guest, the
  source resumes the guest without asking the destination.

Each step is recorded on disk first (:mod:`vtorque_survive.migration_record`), so the watcher can
continue if the process is killed.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import IO, Any

from vtorque_core.api import Busy, HostFault, Paths, Refused, VtorqueError, printable
from vtorque_core.api.batch_system import JobState, MigrationAdapter
from vtorque_core.api.children import wait_readable
from vtorque_core.api.node_job import Site
from vtorque_core.api.unprivileged_parser import helper_process
from vtorque_core.live import kept_jobs, libvirt, service, suspend
from vtorque_core.live.jobs import RunningJob, RunningJobs
from vtorque_survive import domains, guest_migration, migrate_disk, migration_record, reach, saving
from vtorque_survive.clocks import set_clocks
from vtorque_survive.migration_record import AWAY, GONE, Move
from vtorque_survive.saving import GuestData
from vtorque_survive.settings import Settings

_READY = 90.0  # seconds besides start_timeout, for the placeholder job
_TIME, _FIRST, _SLOWEST = 3600.0, 60.0, 10.0  # seconds; then MiB a second
_DISK = 1800.0  # seconds for a guest's own disk; the receiver waits longer
_COMES, _POLL = 60.0, 1.0  # seconds for an undecided guest to arrive; between polls
_AT_ONCE = 4  # libvirtd allows 5 calls per connection (max_client_requests); one must cancel
_ENDS = 5.0  # seconds between two checks whether the job ends
log = logging.getLogger(__name__)

on_step: Callable[[str], None] = lambda _step: None  # noqa: E731
"""For tests only: called with the name of the next or the completed step."""


@dataclass(frozen=True)
class ThisNode:
    """This node's site config, batch system and libvirt, for migrations."""

    config: Path
    site: Site
    adapter: MigrationAdapter
    node: guest_migration.MigrationNode

    @classmethod
    def from_config(cls, config: Path) -> ThisNode:
        """Return this node.

        Raises:
            Refused: If the batch system cannot reserve another node for a guest.
        """
        site, batch = service.batch_system(config)
        adapter = batch.node(site)
        if not isinstance(adapter, MigrationAdapter):
            raise Refused(
                "guests cannot be migrated on this batch system, because it cannot reserve another "
                "node for a running job"
            )
        return cls(config, site, adapter, guest_migration.MigrationNode.from_config(config))

    @property
    def paths(self) -> Paths:
        """The node's file locations."""
        return self.site.paths

    @property
    def settings(self) -> Settings:
        """The settings in ``[plugin.survive]``."""
        return self.site[Settings]

    def job_states(self, ids: Sequence[str]) -> Mapping[str, JobState]:
        """Return the states of these jobs, with one query to the batch system."""
        _, batch = service.batch_system(self.config)
        return batch.node(self.site).job_states(ids)

    def job(self, job_id: str) -> RunningJob | None:
        """Return a job that has guests or resources on this node."""
        found = [job for job in RunningJobs(self.paths).jobs() if job.job.id == job_id]
        return found[-1] if found else None

    def release(self, job_id: str) -> None:
        """Release the job's resources on this node, as its epilogue does."""
        place = service.installation_of(self.config)
        argv = [*place.hook("epilogue"), job_id]
        done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, check=False)
        if done.returncode:
            raise HostFault(f"some resources of job {job_id} are not released: run vtorque reap")


def migrate(here: ThisNode, job_id: str, to: str) -> None:
    """Migrate the guests that a job has on this node.

    Raises:
        Refused: If the job or the site does not support migration.
        HostFault: If some guests have not migrated.
    """
    for before in migration_record.all_moves(here.paths):
        if before.job == job_id and before.phase != AWAY and _has_migrated(here, before, to):
            return
    job = here.job(job_id)
    if job is None or not job.guests:
        raise Refused(f"job {printable(job_id)} has no guest on this node: {_hint(here, job_id)}")
    nodes = require(here.settings, here.paths, job, to)
    with migration_record.lock_migration(here.paths, job.job.key):
        why = _attempt(here, job, to, nodes)
        move = Move.read(here.paths, job.job.key)
        if move is None or move.phase == AWAY:
            raise HostFault(why)
        _resolve(here, move, why)


def _has_migrated(here: ThisNode, before: Move, to: str) -> bool:
    """Finish or undo an interrupted migration. Return whether all guests are on the node ``to``."""
    try:
        resolve(here, before)
    except HostFault:
        if Move.read(here.paths, before.key) is not None:  # the owner is unknown
            raise
        return False
    return before.to == to


def _hint(here: ThisNode, job_id: str) -> str:
    """Return a hint that names the node on which to run ``vmgr migrate``."""
    _, batch = service.batch_system(here.config)
    with suppress(VtorqueError, OSError):
        for each in batch.submitter(here.site).jobs():
            if each.id == job_id and each.nodes:
                return f"run the command on the source node, one of {', '.join(each.nodes)}"
    return "run the command on the source node"


def require(settings: Settings, paths: Paths, job: RunningJob, to: str) -> tuple[str, ...]:
    """Return the job's nodes after the migration. Does not contact other nodes.

    Raises:
        Refused: If the job cannot be migrated.
    """
    facts = job.kept.facts()
    nodes = tuple(str(node) for node in facts.get("nodes", ()))
    node, lacking = job.job.node, facts.get("immovable")
    reach.argv(settings, to, ())
    if node not in nodes[1:]:
        advice = "with checkpoints_shared, use vmgr checkpoint --stop and vsub -vm resume=ID"
        raise Refused(f"{node} runs the job shell: guests on {node} cannot migrate; {advice}")
    if to in nodes:
        raise Refused(f"{to} already runs a guest of the job: choose another node")
    if lacking is None:
        raise Refused("the job was started by a version of vTorque that cannot migrate guests")
    if lacking:
        raise Refused(f"the guests use resources that cannot be migrated: {', '.join(lacking)}")
    if len(job.guests) < len(facts.get("guests", ())):
        raise Refused("some of the job's guests have migrated before: the rest cannot migrate")
    if suspend.phase(job) != suspend.RUNS or suspend.is_incomplete(paths, job):
        raise Refused("the job is suspended, starting or ending: resume it, or migrate it later")
    return tuple(to if each == node else each for each in nodes)


def _attempt(here: ThisNode, job: RunningJob, to: str, nodes: tuple[str, ...]) -> str:
    """Try to migrate the guests; return an error message, or an empty string.

    After this call, the caller determines which node owns the guests.
    """
    try:
        with saving.hold(here.paths, job, suspend.RUNS) as (locked, guests):
            if any(saving.has_user_disk(each.guest.run_dir) for each in guests):
                raise Refused("the job uses a disk file (disk=), which cannot be migrated")
            told = guest_migration.describe_guests(job, guests, nodes, to)
            on_step("before record")
            _record(job, guests, to, nodes).write(here.paths)
            on_step("after record")
            locked.enter(guest_migration.MOVES)
            log.info("migrating the guests to %s", to)
            on_step("after mark")
            with (
                _abort_on_job_end(here, job) as over,
                _receiver(here, to, told, over) as xml,
                _bridge(here, job, to, guests) as uri,
            ):
                on_step("before send")
                _send_all(here, job, guests, to, uri, xml, over)
                on_step("after send")
    except (VtorqueError, OSError) as error:
        return str(error)
    return ""


def _send_all(
    here: ThisNode, job: RunningJob, guests: Sequence[GuestData], to: str, uri: str,
    xml: Mapping[str, str], over: int,
) -> None:  # fmt: skip
    """Send all guests in parallel. If one guest fails, stop sending the others.

    ``over`` is a descriptor that becomes readable when the job ends.
    """
    seconds = min(_TIME, _FIRST + sum(each.guest.ram_mib for each in guests) / _SLOWEST)
    failed, errors, until = threading.Event(), list[HostFault](), time.monotonic() + _DISK

    def stop() -> bool:
        return time.monotonic() >= until or failed.is_set() or bool(wait_readable([over], 0))

    def note_failure(error: HostFault) -> None:
        if not failed.is_set():
            errors.append(error)
            failed.set()

    def send(each: GuestData) -> None:
        guest, limit = each.guest, seconds + (migrate_disk.REST if each.disk else 0.0)
        try:
            with (
                _send_disk(here, job, to, each, stop) as rest_of_disk,
                saving.libvirt_operation(here.paths, job, guest, limit, failed, _TIME),
            ):
                if failed.is_set():
                    raise HostFault("another guest of the job cannot be migrated")
                try:
                    rest_of_disk()
                    guest_migration.migrate_guest(each, uri, xml[guest.uuid], seconds)
                    if each.disk and domains.domain_state(guest.uri, guest.uuid):
                        raise HostFault("libvirt has not removed the migrated guest from this node")
                except HostFault as error:
                    note_failure(error)  # before the worker takes another guest
                    raise
        except HostFault as error:
            note_failure(error)
            raise

    with ThreadPoolExecutor(min(_AT_ONCE, len(job.guests))) as threads:
        sends = [threads.submit(send, each) for each in guests]
        done, left = wait(sends, return_when=FIRST_EXCEPTION)
        while left:  # repeat: canceling has no effect before libvirt sends
            _abort_sending(job)
            left = wait(left, _POLL).not_done
    for error in errors:
        raise error
    for each in done:
        each.result()


def _send_disk(
    here: ThisNode, job: RunningJob, to: str, each: GuestData, stop: Callable[[], bool]
) -> AbstractContextManager[Callable[[], None]]:
    """Return a context that sends a guest's own disk; see :func:`.migrate_disk.send_disk`."""
    argv = reach.argv(here.settings, to, service.vmgr(here.config, "arrival"))
    asked = {"ask": "disk", "job": job.job.id, "key": job.job.key, "guest": each.guest.uuid}
    pause = partial(guest_migration.pause, each.guest)
    return migrate_disk.send_disk(argv, asked, each.disk, pause, stop)


def _abort_sending(job: RunningJob) -> None:
    for guest in job.guests:
        domains.abort_operation(guest.uri, guest.uuid)


@contextmanager
def _abort_on_job_end(here: ThisNode, job: RunningJob) -> Iterator[int]:
    """Abort sending guests when their job ends, because the job's epilogue waits for the migration.

    Yields a descriptor that becomes readable when the job ends.
    """
    sent, (over, ends) = threading.Event(), os.pipe()

    def poll_job() -> None:
        while not sent.wait(_ENDS):
            with suppress(VtorqueError):
                if here.adapter.has_ended(job.job.id, job.job.attempt):
                    log.info("the job is ending: its migration is canceled")
                    os.write(ends, b"!")
                    _abort_sending(job)

    thread = threading.Thread(target=poll_job)
    thread.start()
    try:
        yield over
    finally:
        sent.set()
        thread.join()
        os.close(over)
        os.close(ends)


def _record(job: RunningJob, guests: Sequence[GuestData], to: str, nodes: tuple[str, ...]) -> Move:
    of, uri = job.job, guests[0].guest.uri
    leased = {each.guest.uuid: each.leased for each in guests}
    return Move(of.id, of.attempt, of.key, of.node, to, uri, nodes, leased)


@contextmanager
def _bridge(here: ThisNode, job: RunningJob, to: str, guests: Sequence[GuestData]) -> Any:
    directory = _find_bridge(here, job.job.key)
    with reach.Bridge(here.settings, to, guests[0].guest.uri, directory) as bridge:
        yield bridge.uri


def _find_bridge(here: ThisNode, key: str) -> Path:
    return here.paths.run / f"move-{key}"


@contextmanager
def _receiver(here: ThisNode, to: str, told: Mapping[str, Any], over: int) -> Any:
    """Start the receiver on the destination; yield each guest's XML for that node, by UUID.

    When the context ends without an error, wait until the destination has finished. The wait
    ends early if ``over`` becomes readable, because the job has then ended.
    """
    place = service.installation_of(here.config)
    argv = reach.argv(here.settings, to, place.hook("receive"))
    seconds = here.node.start_timeout + _READY
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, bufsize=0
        ) as receiver,
    ):
        assert receiver.stdin is not None and receiver.stdout is not None  # noqa: S101
        answers = (receiver.stdout, bytearray())
        try:
            receiver.stdin.write(json.dumps(told).encode() + b"\n")
            xml = _answer(*answers, over, seconds, to, errors).get("xml")
            if not isinstance(xml, dict) or xml.keys() != {g["uuid"] for g in told["guests"]}:
                raise HostFault(f"{to} did not send valid domain XML for the guests")
            on_step("ready")
            yield {uuid: str(each) for uuid, each in xml.items()}
            _answer(*answers, over, seconds, to, errors)
        finally:
            receiver.stdin.close()  # ends a receiver that still waits
            receiver.kill()


def _answer(
    answers: IO[bytes], said: bytearray, over: int, seconds: float, to: str, errors: IO[bytes]
) -> dict[str, Any]:
    """Return the next line from the destination. ``said`` buffers the data after that line.

    Raises:
        Refused: If the destination reports a failure.
        HostFault: If there is no answer.
    """
    until = time.monotonic() + seconds
    while b"\n" not in said:
        if not wait_readable([answers.fileno(), over], max(0.0, until - time.monotonic())):
            raise HostFault(f"{to} did not answer within {seconds:g} s")
        if wait_readable([over], 0):
            raise HostFault("the job is ending")
        data = answers.read(1 << 16)
        if not data:
            errors.seek(0)
            last = errors.read(1 << 16).decode("utf-8", "replace").strip().rpartition("\n")[2]
            raise HostFault(f"the receiver on {to} exited: {printable(last or 'no message', 300)}")
        said += data
    line, _, said[:] = bytes(said).partition(b"\n")
    try:
        found: dict[str, Any] = json.loads(line)
        failed = found.get("failed")
    except (ValueError, AttributeError):
        text = printable(line.decode("utf-8", "replace"), 100)
        raise HostFault(f"invalid answer from {to}: {text}") from None
    if failed:
        raise Refused(f"{to}: {printable(str(failed), 500)}")
    return found


def resolve_all(here: ThisNode, job_id: str) -> None:
    """Finish or undo a job's interrupted migrations, unless another process works on them."""
    for move in migration_record.all_moves(here.paths):
        if move.job == job_id and move.phase != AWAY:
            with suppress(Busy):
                resolve(here, move)


def resolve(here: ThisNode, move: Move) -> None:
    """Determine which node owns the guests of an unfinished migration, and finish or undo it.

    Raises:
        Busy: If another process works on the migration.
        HostFault: If no guest has migrated: the migration is undone. If only some guests have
            migrated: the migration is finished, and the other guests stay on this node. If it is
            unknown which node owns the guests.
    """
    # The watcher briefly locks it.
    with migration_record.lock_migration(here.paths, move.key, _POLL):
        found = Move.read(here.paths, move.key)
        if found is not None:
            _resolve(here, found, "the migration was interrupted")


def _resolve(here: ThisNode, move: Move, why: str) -> None:
    shutil.rmtree(_find_bridge(here, move.key), ignore_errors=True)  # of a killed process
    if move.phase == migration_record.EITHER:
        job = here.job(move.job)
        stays = f"the guests are still on {move.node}: {why or 'they did not arrive there'}"
        if job is None or job.job.key != move.key:  # an epilogue has released it
            said = _ask_peer(here, move, dict.fromkeys(move.guests, "still"))  # resume none there
            gone, stays = _parse_guests(said), f"job {move.job} has ended"
        else:
            gone = _migrated_guests(here, move, job, why)
        if not gone:
            migration_record.forget(here.paths, move.key)
            raise HostFault(stays)
        guests = {uuid: leased for uuid, leased in move.guests.items() if uuid in gone}
        part = job is not None and len(guests) < len(move.guests)
        move = replace(move, guests=guests, part=part).enter_phase(here.paths, GONE)
    if move.phase == GONE:
        (_split_job if move.part else _release_source)(here, move)
        move = move.enter_phase(here.paths, AWAY)
        if move.part:
            count = len(move.guests)
            raise HostFault(f"only {count} of the guests have migrated to {move.to}: {why}")


def _parse_guests(said: Mapping[str, str]) -> set[str]:
    return {uuid for uuid, where in said.items() if where == "here"}


def _migrated_guests(here: ThisNode, move: Move, job: RunningJob, why: str) -> set[str]:
    both = f"a guest of the job runs on both {move.node} and {move.to}: destroy one with virsh"
    if suspend.phase(job):  # the migration did not begin, or was undone
        if _parse_guests(_ask_peer(here, move, dict.fromkeys(move.guests, "runs"))):
            raise HostFault(both)
        return set()
    if [mark for mark, _ in job.phases][-1:] != [guest_migration.MOVES]:
        raise HostFault("the job's resources on this node are being released")
    # Without the job's lock, which an epilogue may need. No other process migrates these guests.
    mine = {uuid: guest_migration.await_state(move.uri, uuid, _TIME) for uuid in move.guests}
    on_step("resolved")
    if why and guest_migration.disks(here.paths, move.key):
        _resume_guests(here, job, mine)
    try:
        # Without an error (why), the destination has just reported that it runs all guests.
        gone = _parse_guests(_ask_peer(here, move, mine)) if why else set(move.guests)
    except HostFault as error:
        state = "PAUSED on this node" if "still" in mine.values() else "as they are"
        with kept_jobs.logging_for(here.paths, job.job):
            log.error("%s; the guests stay %s until %s answers", error, state, move.to)
        raise HostFault(f"{error}: the guests stay {state} until {move.to} answers") from None
    on_step("asked")
    if any(mine[uuid] == "runs" for uuid in gone):
        raise HostFault(both)
    if gone and not any(mine[uuid] for uuid in mine.keys() - gone):
        gone = set(mine)  # the others have ended, so nothing stays here
    with saving.hold(here.paths, job, guest_migration.MOVES) as (locked, guests):
        for each in guests:
            if each.guest.uuid not in gone and mine[each.guest.uuid]:  # otherwise it has ended
                libvirt.resume_domain(each.guest.uri, each.guest.uuid)
        if gone:
            log.info("%d of %d guests have migrated to %s", len(gone), len(mine), move.to)
        else:
            log.info("the guests stay on %s: %s", move.node, why or "they did not arrive")
            locked.enter(suspend.RUNS)
        return gone


def _resume_guests(here: ThisNode, job: RunningJob, mine: dict[str, domains.State]) -> None:
    """Resume the guests with their own disk that a failed migration left paused on this node.

    Such a guest cannot run on the destination yet: this node pauses the guest to send its disk, and
    the destination resumes the guest only after this node has reported that it no longer has the
    guest. libvirt itself resumes other guests on the destination, so the caller asks the
    destination before it resumes them. In ``mine``, set the state of each resumed guest to "runs".
    """
    with saving.hold(here.paths, job, guest_migration.MOVES) as (_, guests):
        stand = [each.guest for each in guests if each.disk and mine[each.guest.uuid] == "still"]
        with ExitStack() as each_goes_on:  # resumes all, even if one fails
            for guest in stand:
                each_goes_on.callback(libvirt.resume_domain, guest.uri, guest.uuid)
        if stand:
            with suppress(VtorqueError, OSError), helper_process():
                set_clocks(here.paths, job).wait()
        mine.update({guest.uuid: "runs" for guest in stand})


def _ask_peer(here: ThisNode, move: Move, mine: Mapping[str, str]) -> dict[str, str]:
    """Ask the destination where each guest is. ``mine`` has the guests' states on this node."""
    until = time.monotonic() + _COMES
    what: dict[str, Any] = {"ask": "resolve", "job": move.job, "key": move.key, "node": move.to}
    what["guests"] = dict.fromkeys(move.guests, "") | dict(mine)
    while True:
        said = dict(reach.ask(here.config, here.settings, move.to, what))
        if said.keys() == move.guests.keys() and {*said.values()} <= {"here", "none"}:
            return said
        if time.monotonic() >= until:
            raise HostFault(f"{move.to} does not know yet whether the guests have arrived")
        time.sleep(_POLL)


def _split_job(here: ThisNode, move: Move) -> None:
    """Let the job continue with the guests that have not migrated. Idempotent."""
    job = here.job(move.job)
    if job is not None and job.job.key == move.key and not suspend.phase(job):
        with saving.hold(here.paths, job, guest_migration.MOVES) as (locked, _):
            guest_migration.release_guests(locked, move.guests)
        _notify(here, move, move.nodes[0], job)
    on_step("after part")


def _notify(here: ThisNode, move: Move, node: str, job: RunningJob | None) -> None:
    """Notify ``node``, a node of the job, that guests have migrated.

    If ``node`` is the job's first node, also send a description of the guests.

    Best effort: the destination's watcher notifies the first node again.
    """
    what: dict[str, Any] = {"ask": "gone", "job": move.job, "key": move.key, "to": move.to}
    gone = [each for each in job.guests if each.uuid in move.guests] if job else []
    what["node"] = "" if move.part else move.node
    what["guests"] = migration_record.describe_guests(gone if node == move.nodes[0] else [])
    with suppress(HostFault, Refused):
        reach.ask(here.config, here.settings, node, what)


def _release_source(here: ThisNode, move: Move) -> None:
    """Release the guests' resources, return this node to Slurm, and notify the job's other nodes.

    Do nothing if the guests have returned or are about to return.
    """
    job = here.job(move.job)
    ours = job is not None and job.job.key == move.key
    if job is not None and ours and guest_migration.MOVES not in dict(job.phases):
        return
    with ThreadPoolExecutor(len(move.nodes)) as threads:
        others = [node for node in move.nodes if node != move.to]
        told = [threads.submit(_notify, here, move, node, job if ours else None) for node in others]
        if ours:
            on_step("before release")
            try:
                here.release(move.job)
            except HostFault as error:
                raise HostFault(f"the job's guests run on {move.to}, but {error}") from None
            on_step("after release")
    for done in told:
        done.result()
    try:
        here.adapter.release_node(move.job, move.node)
        if not here.adapter.has_ended(move.job, move.attempt):
            here.adapter.remove_node(move.job, move.node)
    except VtorqueError as error:  # permanent without slurmdbd, or for unusual job names
        log.warning("node %s stays reserved until job %s ends: %s", move.node, move.job, error)
    on_step("after leave")
