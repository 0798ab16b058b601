"""Restore a job from a checkpoint (``-vm resume=ID``). Runs as root."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from vtorque_core.api import (
    Image,
    JobAttempt,
    JobRequest,
    Paths,
    Refusal,
    Refused,
    name_errors,
)
from vtorque_core.api.batch_system import BatchJob
from vtorque_core.api.boot_source import Boot, BootSource, Identity
from vtorque_core.api.children import run_in_child, wait_readable
from vtorque_core.api.guest_driver import LEFT
from vtorque_core.api.guest_plan import GuestPlan, JobUser
from vtorque_core.api.job_files import File
from vtorque_core.api.kept_records import place
from vtorque_core.api.node_job import NodeJob, Site
from vtorque_core.api.vm_options import DISK
from vtorque_core.live import changes
from vtorque_core.live.jobs import RunningJobs
from vtorque_survive import shared_store, tools
from vtorque_survive.resources import Link, RestoredDisk, in_use_fault
from vtorque_survive.resume_options import BEGINNING, CHECKPOINT, NEVER, RESUME
from vtorque_survive.settings import Settings
from vtorque_survive.stored import SESSION, Manifest, SavedGuest, Store

_TRIES = 2  # failed restores until a requeued job starts from the beginning
_LOOKS = 10.0  # seconds to examine the user's disk files
_RELEASED = 60.0  # seconds until the saved job is released
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class CheckpointSource(BootSource):
    """A guest in a checkpoint, as a boot source.

    The guest resumes only when all guests of the job, on all nodes, can resume.
    """

    saved: SavedGuest
    gate: shared_store.Gate | None = None

    name = "checkpoint"
    brings_disk = True

    @property
    def identity(self) -> Identity:
        """The guest's identity when it was saved."""
        return self.saved

    def start(self, boot: Boot) -> None:
        """Restore the guest's memory. The guest stays paused.

        Raises:
            Refused: If the job requests other hardware than the guest has.
        """
        boot.restore(self.saved.memory, self.saved.state_dir, self.saved.run_dir)

    def run(self, boot: Boot) -> None:
        """Wait until all guests of the job are restored, then resume this guest."""
        if self.gate is not None:
            self.gate(boot.deadline, boot.failed)
        boot.resume()

    def await_ready(self, boot: Boot) -> None:
        """Wait until the guest answers, and set its clock."""
        boot.await_ready()
        boot.set_clock()


def boot_sources(
    job: BatchJob, request: JobRequest, image: Image, user: JobUser, site: Site
) -> Iterator[BootSource]:
    """Yield the saved guests if the job is restored from a checkpoint."""
    settings = site[Settings]
    if settings.checkpoints_shared:
        shared_store.require_mounted(Path(settings.checkpoints))
    store = Store(Path(settings.checkpoints), user.uid)
    found = _last_checkpoint(job, request, store) if settings.checkpoints else None
    others = list(_find_differences(job, image, found, user, site)) if found is not None else []
    if others:
        log.warning("%s: the job starts from the beginning", "; ".join(map(str, others)))
    if found is None or others:
        if request[RESUME] in ("", BEGINNING):
            return
        if not settings.checkpoints:
            where = "[plugin.survive] checkpoints"
            raise Refused(
                Refusal(
                    "checkpoints are disabled on this node",
                    RESUME.key,
                    request[RESUME],
                    where=where,
                )
            )
        found = store.read(request[RESUME])
        if others := list(_find_differences(job, image, found, user, site)):
            raise Refused(*others)
    log.info("restored from checkpoint %s", found.id)
    _await_released(site.paths, found)
    here = found.node_part(job.node_index)
    attempt = JobAttempt(job.id, job.attempt, user.name, user.uid, job.node)
    if shared_store.is_shared_by_nodes(site):
        shared_store.acquire_mark(store, here, attempt, site)
    gate = shared_store.Gate(store, found, job.nodes, attempt, site) if found.nodes > 1 else None
    yield from (CheckpointSource(guest, gate) for guest in here.guests)


def _last_checkpoint(job: BatchJob, request: JobRequest, store: Store) -> Manifest | None:
    """Return the checkpoint from which a requeued job is restored by default, or None."""
    if not job.attempt or request[RESUME] == BEGINNING:
        return None
    its = store.list_for_job(job.id)
    if request[CHECKPOINT] == NEVER and not any(store.is_held(each.id) for each in its):
        return None
    found = next(reversed(its), None)
    if found is None:
        log.warning("requeued without a checkpoint: the job starts from the beginning")
    elif (failed := _count_failed(store, found, job)) >= _TRIES:
        what = "restoring checkpoint %s has failed %d times: the job starts from the beginning"
        log.warning(what, found.id, failed)
        return None
    return found


def _count_failed(store: Store, found: Manifest, job: BatchJob) -> int:
    """Return how many earlier starts from this checkpoint have failed, on any node."""
    own = JobAttempt(job.id, job.attempt, job.owner, store.uid).key
    with suppress(FileNotFoundError):
        tries = store.failure_file(found.id).read_text("utf-8").splitlines()
        return len([key for key in tries if key != own])
    return 0


def saved_guest(guest: GuestPlan) -> SavedGuest | None:
    """Return the saved guest from which this guest is restored, or None."""
    return guest.source.saved if isinstance(guest.source, CheckpointSource) else None


def reset_failures(job: NodeJob) -> None:
    """Reset the checkpoint's count of failed starts, because the restored guests run."""
    saved = saved_guest(job.guests[0])
    if saved is not None:
        store = Store(Path(job.site[Settings].checkpoints), job.user.uid)
        with suppress(OSError):
            store.failure_file(saved.memory.parent.name).unlink()


def _find_differences(
    job: BatchJob, image: Image, found: Manifest, user: JobUser, site: Site
) -> Iterator[Refusal]:
    """Yield a refusal for each difference from the saved job that prevents a restore."""
    if found.owner != user.name:  # uids may be reassigned
        yield Refusal(
            f"is a checkpoint of user {found.owner}, who alone can restore it", RESUME.key, found.id
        )
    version = tools.tools(tools.cpu_model(found.tools))
    here = {"node": job.node, "image": f"{image.name} {image.sha256}", **version}
    then = {"node": found.node, "image": f"{found.image} {found.sha256}", **found.tools}
    if shared_store.is_shared_by_nodes(site):
        del then["node"]
    if found.nodes != len(job.nodes):
        what = (
            f"the checkpoint is of a job on {found.nodes} nodes, but this job has {len(job.nodes)}"
        )
        yield Refusal(what, RESUME.key, found.id)
    elif found.nodes > 1 and not shared_store.is_shared_by_nodes(site):
        what = (
            "a checkpoint of a job on several nodes can only be restored if all nodes share "
            "the checkpoints' directory"
        )
        where = "[plugin.survive] checkpoints_shared"
        yield Refusal(what, RESUME.key, found.id, where=where)
    for name, was in then.items():
        if was != here.get(name):
            what = (
                f"the checkpoint was made with {name} {was}, but this node has "
                f"{here.get(name, 'none')}"
            )
            yield Refusal(what, RESUME.key, found.id)


def acquire_empty_disks(job: NodeJob) -> None:
    """Create empty disk files for guests that migrate here; the source node sends the content."""
    for guest in job.guests:
        if guest.image.disk is not None:
            job.acquire(RestoredDisk(str(guest.root_disk), guest.qemu_uid), guest=guest)


def acquire_saved(job: NodeJob) -> None:
    """Acquire what the checkpoint contains: the guests' disks and the job shell's session state."""
    first, settings = job.guests[0], job.site[Settings]
    asks = first[CHECKPOINT] != NEVER
    cpu = settings.cpu_model if asks else ""
    if settings.checkpoints and not first.job.attempt and not first.rank:  # once, at first
        _disown(Store(Path(settings.checkpoints), job.user.uid), first.job.id)
    if (saved := saved_guest(first)) is not None:
        store = Store(Path(settings.checkpoints), job.user.uid)
        found = store.read(saved.memory.parent.name)
        found = found.node_part(first.rank // len(job.guests))
        cpu = tools.cpu_model(found.tools)
        _require_disks(job, found)
        if shared_store.is_shared_by_nodes(job.site):
            job.acquire(shared_store.acquire_mark(store, found, first.job, job.site), guest=first)
        if not first.rank:
            with (
                suppress(OSError),
                store.failure_file(found.id).open("a", encoding="utf-8") as tries,
            ):
                tries.write(f"{first.job.key}\n")
    if cpu:
        place(job.site.paths, first.job).add_facts(cpu=cpu)
    for guest in job.guests:
        if (saved := saved_guest(guest)) is not None:
            if guest.rank == 0:
                _acquire_session(job, guest, saved.memory.with_name(SESSION))
            disk = saved.memory.with_suffix(".disk")
            if disk.exists():
                made = RestoredDisk(str(guest.root_disk), guest.qemu_uid, str(disk))
                job.acquire(made, guest=guest)


def _require_disks(job: NodeJob, found: Manifest) -> None:
    """Raise Refused if a disk file of the user has changed since the job was saved.

    The guests already hold locks on the files, so no other job can change the files now.
    """

    def compare() -> None:
        if tools.disks(guest.run_dir for guest in job.guests) != found.disks:
            raise Refused(
                (
                    "a disk file of the job (disk=) was changed or replaced after the checkpoint "
                    "was made: the restored guest would corrupt it"
                )
                if found.disks
                else "the checkpoint was made without a disk file (disk=)"
            )

    if wrong := run_in_child(compare, _LOOKS):
        value = job.guests[0].request[DISK]
        raise Refused(
            Refusal(
                wrong, DISK.key, value, fix=f"leave out {RESUME.key} to start from the beginning"
            )
        )


def _disown(store: Store, job_id: str) -> None:
    with name_errors(store.directory):
        store.disown(job_id)


def _acquire_session(job: NodeJob, guest: GuestPlan, source: Path) -> None:
    with name_errors(source):
        content = source.read_bytes()
    there = str(guest.state_dir / LEFT)  # on disk: up to 96 MiB are too much for /run
    job.acquire(File(there, mode=0o400, reader=job.user.uid, content=content), guest=guest)
    job.acquire(Link(str(guest.run_dir / LEFT), there), guest=guest)


def _await_released(paths: Paths, found: Manifest) -> None:
    """Wait until the saved job's resources are released.

    Otherwise the saved job's teardown would end the restored guests, which have the same UUIDs.
    """
    uuids = {guest.uuid for guest in found.guests}
    until = time.monotonic() + _RELEASED
    running, events = RunningJobs(paths), changes.events()
    try:
        changes.watch(events, paths.journal, content=False)
        while True:
            having = [j for j in running.jobs() if uuids & {guest.uuid for guest in j.guests}]
            left = until - time.monotonic()
            if not having:
                return
            if left <= 0:
                job = having[0].job.id
                raise in_use_fault(f"checkpoint {found.id} is in use by job {job}")
            wait_readable([events], min(left, 1.0))
            with suppress(BlockingIOError):
                os.read(events, 1 << 16)
    finally:
        os.close(events)
