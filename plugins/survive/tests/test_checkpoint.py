"""Checkpoints by the watcher, with real journals, processes and files; libvirt is a double.

With real guests on Debian 13: tests/e2e/test_checkpoint.py.
"""

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import running_journal
import sparing
from finished import finish
from patience import LONG, eventually
from vtorque_core.api import HostFault, Refused, children
from vtorque_core.api.batch_system import JobState
from vtorque_core.base import hypervisor
from vtorque_core.live import libvirt, suspend
from vtorque_core.live.jobs import RunningJobs
from vtorque_core.records.reading import read
from vtorque_core.resources.disk import Overlay
from vtorque_survive import (
    checkpoint,
    domains,
    node_parts,
    periodic,
    request,
    restore,
    room,
    saving,
    session,
    shared_store,
    stored,
    tools,
    watcher,
)
from vtorque_survive.checkpoint import CheckpointWatcher
from vtorque_survive.node_parts import WHY, NodePart
from vtorque_survive.resume_options import CHECKPOINT
from vtorque_survive.saving import GuestData
from vtorque_survive.settings import Settings
from vtorque_survive.sparse import copy_data
from vtorque_survive.stored import MANIFEST, Manifest, Store
from vtorque_survive.watcher import WatcherLoop

pytestmark = pytest.mark.e2e  # starts many processes

HOLDS = """
import fcntl, sys, time
file = open(sys.argv[1], "r+")
fcntl.flock(file, fcntl.LOCK_EX)
fcntl.lockf(file, fcntl.LOCK_EX)
print("locked", flush=True)
time.sleep(600)
"""
POLLED = [""]  # the node whose watcher runs now
FIFOS = ("leave.fifo", "tell.fifo")
STEPS = [
    f"{when} {what}"
    for what in ("directory", "disk", "memory", "session", "manifest", "finish", "leave")
    for when in ("before", "after")
]


@pytest.fixture
def paths(tmp_path):
    return running_journal.paths_below(tmp_path)


@pytest.fixture
def recorded_actions(tmp_path, monkeypatch):
    """Replace libvirt, the guest and the batch system; their actions are recorded in a file."""
    did = tmp_path / "did"
    did.touch()
    state = SimpleNamespace(fails="", dies="", on="", did=lambda: did.read_text().splitlines())

    def note(what, uuid=""):
        with did.open("a") as file:
            file.write(f"{what} {uuid}".rstrip() + "\n")

    def gone(uuid):
        return f"ended {uuid}" in state.did()

    def save(_uri, uuid, path, _timeout):
        if state.fails in ("all", uuid):
            Path(path).write_bytes(b"LibvirtQemudPart")
            raise HostFault("save domain: No space left on device")
        note("saved", uuid)  # before the watcher after a killed one can find it complete
        Path(path).write_bytes(b"LibvirtQemudSave and memory")

    def resume(_uri, uuid, _timeout):
        if gone(uuid):
            raise HostFault("ended")
        note("resume")

    monkeypatch.setattr(hypervisor, "suspend_domain", lambda *_: note("suspend"))
    monkeypatch.setattr(hypervisor, "resume_domain", resume)
    monkeypatch.setattr(domains, "save_domain", save)
    monkeypatch.setattr(domains, "is_busy", lambda *_: False)
    monkeypatch.setattr(libvirt, "domain_runs", lambda _uri, uuid: not gone(uuid))
    monkeypatch.setattr(libvirt, "destroy_domain", lambda _uri, uuid, _: note("ended", uuid))
    batch = SimpleNamespace(knows_all_nodes=True)
    batch.submitter = lambda _: SimpleNamespace(cancel=cancel)
    monkeypatch.setattr(checkpoint.service, "batch_system", lambda _: (None, batch))
    monkeypatch.setattr(checkpoint.tools, "tools", lambda cpu="": {"QEMU": "10.0.13"})
    monkeypatch.setattr(session, "_LEAVES", 1.0)
    monkeypatch.setattr(checkpoint, "_GONE", 0.0)  # the requester is this process
    monkeypatch.setattr(checkpoint, "_TELLS", 0.0)
    monkeypatch.setattr(watcher, "_PAUSE", 0.01)
    for each in (request, session, node_parts):
        monkeypatch.setattr(each, "_POLL", 0.01)

    def expect_break(_paths, _job, seconds, _deadline):
        on_step(f"wait {seconds}")
        note(f"wait {seconds}")

    def cancel(_job_id):
        note("canceled")
        return 0

    def on_step(step):
        on_this_node = state.on in ("", POLLED[0])
        if on_this_node and step == state.dies and f"died {step}" not in state.did():
            note("died", step)
            os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(checkpoint, "on_step", on_step)
    monkeypatch.setattr(saving, "allow_disconnect", expect_break)
    return state


@pytest.fixture
def top(tmp_path):
    place = tmp_path / "checkpoints"
    place.mkdir(mode=0o700)
    return place


@pytest.fixture
def loop(paths, recorded_actions, top):
    found = made(paths, Settings(checkpoints=str(top)))
    yield found
    for watched in found.jobs.values():
        watched.close()


def made(paths, settings):
    batch = SimpleNamespace(known_states=lambda _ids, *, soon: {})
    return WatcherLoop(paths, batch, CheckpointWatcher(Path("/etc/x"), settings))


def overlay(path):
    return Overlay(path, "/p", "raw")


def started(paths, guests=2, job_id="42.srv", disk_of=overlay, where=("n1", 0), **facts):
    node, ranks = where
    job = running_journal.JournalledJob(paths, job_id, guests=guests, node=node, ranks=ranks)
    known = {"nodes": ["n1"], "guest_type": "acme", "unsaveable": [], "booted_for": ["42.srv", 0]}
    job.kept.add_facts(**known | {"image": "micro", "image_sha256": "00"} | facts)
    for index in range(guests):
        disk = paths.job_state(job.key) / f"g{index}" / "root.qcow2"
        disk.parent.mkdir(parents=True)
        disk.write_bytes(b"disk %d" % index)
        job.run_dir(index)
        job.journal._record([(disk_of(str(disk)), index)], "core", "pre-boot", ())
    request.Fifo(str(request.path_of(paths, job.key)), os.getuid()).create()
    return job


class JobShellDouble(threading.Thread):
    """A double of a job shell that leaves and reports (vtorque_linux_guest.job.handover)."""

    def __init__(self, job, done, tells):
        super().__init__(daemon=True)
        self.fifos, self.done, self.tells = [job.run_dir(0) / n for n in FIFOS], done, tells
        self.over = self.early = False
        self.leaves = True
        self.start()

    def run(self):
        asked = False
        while not self.over:
            time.sleep(0.01)
            leave = self.fifos[0].exists()
            if asked and not leave:
                self.early = not self.done.exists()
                return
            asked = leave
            for fifo in self.fifos if self.leaves else self.fifos[1:]:
                self.write(fifo)

    def write(self, fifo):
        try:
            descriptor = os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            assert error.errno in (errno.ENOENT, errno.ENXIO), error
            return
        os.write(descriptor, b"\n%b\n" % self.tells)
        os.close(descriptor)
        time.sleep(0.05)


@pytest.fixture
def shell(top):
    shells = []

    def begin(job, name="", tells=b"session"):
        shells.append(JobShellDouble(job, top / str(job.uid) / (name or job.key), tells))
        return shells[-1]

    yield begin
    for each in shells:
        each.over = True
        each.join()


def request_answer(loop, job, word="checkpoint"):
    said = []
    path = request.path_of(loop.paths, job.key)
    thread = threading.Thread(target=lambda: said.append(request.ask(path, job.kept, word, 60.0)))
    loop.poll()
    thread.start()
    eventually(lambda: loop.poll() or said)
    thread.join()
    if word == "checkpoint" and not said[0]:
        leave = job.run_dir(0) / "leave.fifo"
        eventually(
            lambda: loop.poll() or (actions_of(loop)[-1] == "canceled" and not leave.exists())
        )
    return said[0]


def send_line(paths, job, line):
    """Write as the job's owner, without waiting for an answer."""
    descriptor = os.open(request.path_of(paths, job.key), os.O_WRONLY | os.O_NONBLOCK)
    os.write(descriptor, line)
    os.close(descriptor)


def phase(job):
    return [mark.name for mark in read(job.journal.path).phases if mark.guest is None][-1]


def assert_resumed(loop, job):
    eventually(lambda: loop.poll() or (phase(job) == "run" and "wait 0" in actions_of(loop)))
    return True


def actions_of(loop):
    return (loop.paths.state.parent / "did").read_text().splitlines()


def test_all_guests_of_a_job_are_saved_and_the_job_ends(loop, paths, recorded_actions, top, shell):
    job = started(paths)
    shell(job)
    assert request_answer(loop, job) == ""
    did = recorded_actions.did()
    assert did[:3] == ["wait 3600", "suspend", "suspend"]
    assert did[5:] == [f"ended {job.uuids[0]}", "canceled"]
    assert set(did[3:5]) == {f"saved {uuid}" for uuid in job.uuids}
    (place,) = (top / str(job.uid)).iterdir()
    assert place.name == job.key and place.stat().st_mode & 0o077 == 0
    assert {p.name for p in place.iterdir()} == {
        "g0.disk", "g0.memory", "g1.disk", "g1.memory", "session", MANIFEST
    }  # fmt: skip
    assert (place / "g1.disk").read_bytes() == b"disk 1"
    assert (place / "session").read_bytes() == b"session"
    found = Store(top, job.uid).read(job.key)
    assert [g.uuid for g in found.guests] == job.uuids and found.tools == {"QEMU": "10.0.13"}
    assert "saved as checkpoint 42.srv.0" in job.kept.read("log.jsonl").decode()
    for _ in range(3):
        loop.poll()
    assert recorded_actions.did() == did, "the watcher saved the job again"


def test_restored_job_has_its_disks_saved_again(loop, paths, recorded_actions, top, shell):
    job = started(paths, disk_of=lambda path: restore.RestoredDisk(path, os.getuid()))
    shell(job)
    assert request_answer(loop, job) == ""
    assert (top / str(job.uid) / job.key / "g1.disk").read_bytes() == b"disk 1"


@pytest.mark.parametrize("step", sparing.each(3, STEPS))
def test_watcher_killed_at_each_step_still_makes_the_checkpoint(
    loop, paths, recorded_actions, top, shell, step
):
    job = started(paths)
    job_shell = shell(job)
    recorded_actions.dies = step
    assert request_answer(loop, job) == "", "the requester did not wait for the retry"
    eventually(lambda: f"died {step}" in recorded_actions.did())  # the last step: after the answer
    eventually(lambda: loop.poll() or recorded_actions.did()[-1] == "canceled")
    saved = {line for line in recorded_actions.did() if line.startswith("saved")}
    assert saved == {f"saved {uuid}" for uuid in job.uuids}
    assert [path.name for path in (top / str(job.uid)).iterdir()] == [job.key]
    assert Store(top, job.uid).read(job.key).id == job.key
    assert not job_shell.early, "the job shell was ended before the checkpoint was complete"


@pytest.mark.parametrize("step", ["after disk", "after memory"])
def test_another_watcher_continues_a_checkpoint_of_a_killed_one(
    loop, paths, recorded_actions, top, shell, step
):
    job = started(paths)
    shell(job)
    recorded_actions.dies = step
    loop.poll()
    send_line(paths, job, b"checkpoint 0123456789abcdef 0\n")
    eventually(lambda: loop.poll() or f"died {step}" in recorded_actions.did())
    shut(loop)
    loop.jobs.clear()
    later = made(paths, loop.checkpoints.settings)
    eventually(lambda: later.poll() or "canceled" in recorded_actions.did())
    assert Store(top, job.uid).has(job.key)
    shut(later)


FIRST = "42.srv.0-3"  # of a job with three phases
STAYS = [step for step in STEPS if step not in ("before leave", "after leave")]


def test_job_is_saved_and_resumed(loop, paths, recorded_actions, top, shell, monkeypatch):
    """The guests resume before the checkpoint is synced to disk, which may take long."""
    job = started(paths)
    shell(job, FIRST)
    finish = Store.finish

    def finishes(store, name):
        with (paths.state.parent / "did").open("a") as file:
            file.write(f"finish: {phase(job)}\n")
        finish(store, name)

    monkeypatch.setattr(Store, "finish", finishes)
    assert request_answer(loop, job, "save") == ""
    assert assert_resumed(loop, job)
    did = recorded_actions.did()
    assert did[:3] == ["wait 3600", "suspend", "suspend"]
    assert set(did[3:5]) == {f"saved {uuid}" for uuid in job.uuids}
    assert did[5:] == ["resume", "resume", "finish: run", "wait 0"]
    assert request.last_checkpoint(job.kept) == FIRST
    assert Store(top, job.uid).read(FIRST).id == FIRST
    assert (top / str(job.uid) / FIRST / "session").read_bytes() == b"session"
    assert not (job.run_dir(0) / "tell.fifo").exists()
    assert "saved as checkpoint 42.srv.0-3; the job continues" in log_of(job)
    for _ in range(3):
        loop.poll()
    assert recorded_actions.did() == did, "the watcher saved the job again"


def with_disk(job):
    """Give the first guest the user's disk file; return the file and its serving process."""
    file = job.run_dir(0).parent / "user.raw"
    file.write_bytes(b"before")
    lock = job.run_dir(0) / "disk-data.lock"
    lock.touch()
    code = HOLDS.replace("fcntl.flock(file, fcntl.LOCK_EX)", "at = open(sys.argv[3])")
    with file.open() as source:
        served = f"filename=/proc/self/fd/{source.fileno()},x"
        argv = [sys.executable, "-c", code, str(lock), served, str(file)]
        held = subprocess.Popen(argv, stdout=subprocess.PIPE, pass_fds=[source.fileno()])
    return file, held


def test_job_with_a_user_disk_is_saved_only_if_it_ends(loop, paths, recorded_actions, top, shell):
    """The checkpoint records the file that the serving process has open."""
    job = started(paths)
    file, served = with_disk(job)
    with served:
        assert served.stdout.readline() == b"locked\n"
        shell(job)
        said = request_answer(loop, job, "save")
        assert (
            "a job with disk= can only be saved with --stop" in said
            and recorded_actions.did() == []
        )
        assert request_answer(loop, job) == ""
        served.kill()
    at = file.stat()
    found = Store(top, job.uid).read(job.key)
    assert found.disks == {"g0/disk-data": [at.st_ino, at.st_size, at.st_mtime_ns]}


def test_unreadable_user_disk_is_reported_before_guests_are_paused(
    loop, paths, recorded_actions, top, shell, monkeypatch
):
    """An example is a file on the user's FUSE mount, which root cannot access."""

    def denied(_):
        raise HostFault("cannot read the status of the file of disk-data: Permission denied")

    job = started(paths)
    shell(job)
    (job.run_dir(0) / "disk-data.lock").touch()
    monkeypatch.setattr(tools, "disks", denied)
    assert "Permission denied" in request_answer(loop, job)
    assert {word.split()[0] for word in recorded_actions.did()} == {"wait"}, (
        "guests were paused or saved"
    )
    assert not Store(top, job.uid).part(job.key).exists()


def test_directory_removed_while_room_is_counted_takes_none(tmp_path):
    """Another user's checkpoint may be renamed or removed after the directory was listed."""
    assert stored.disk_usage(tmp_path / "gone") == (0, 0)


def log_of(job):
    return job.kept.read("log.jsonl").decode()


def test_job_suspended_during_a_checkpoint_stays_paused(
    loop, paths, recorded_actions, top, shell, monkeypatch
):
    job = started(paths)
    shell(job, FIRST)
    stopped, on_step = job.run_dir(0).parent / "stopped", checkpoint.on_step
    step = "after manifest"
    monkeypatch.setattr(checkpoint, "on_step", lambda at: stopped.touch() if at == step else None)
    monkeypatch.setattr(suspend, "is_shell_stopped", lambda *_: stopped.exists())
    assert request_answer(loop, job, "save") == "" and Store(top, job.uid).has(FIRST)
    for _ in range(3):
        loop.poll()
    assert phase(job) == "paused" and "resume" not in recorded_actions.did()
    stopped.unlink()
    monkeypatch.setattr(checkpoint, "on_step", on_step)
    assert assert_resumed(loop, job)


@pytest.mark.parametrize("step", sparing.each(3, [*STAYS, "wait 3600", "wait 0"]))
def test_watcher_killed_at_each_step_still_resumes_the_job(
    loop, paths, recorded_actions, top, shell, step
):
    job = started(paths)
    shell(job, FIRST)
    recorded_actions.dies = step
    assert request_answer(loop, job, "save") == ""
    assert assert_resumed(loop, job) and f"died {step}" in recorded_actions.did()
    assert not of(recorded_actions.did(), "canceled", "ended")
    assert [path.name for path in (top / str(job.uid)).iterdir()] == [FIRST]
    assert Store(top, job.uid).read(FIRST).id == FIRST


@pytest.mark.parametrize("step", ["after disk", "after memory", "after manifest"])
def test_another_watcher_resumes_a_job_that_was_saved(
    loop, paths, recorded_actions, top, shell, step
):
    job = started(paths)
    shell(job, FIRST)
    recorded_actions.dies = step
    loop.poll()
    send_line(paths, job, b"save 0123456789abcdef 0\n")
    eventually(lambda: loop.poll() or f"died {step}" in recorded_actions.did())
    shut(loop)
    loop.jobs.clear()
    later = made(paths, loop.checkpoints.settings)
    assert assert_resumed(later, job)
    assert [path.name for path in (top / str(job.uid)).iterdir()] == [FIRST]
    shut(later)


def test_next_checkpoint_has_another_id(loop, paths, recorded_actions, top, shell):
    job = started(paths)
    for name in (FIRST, "42.srv.0-5"):
        left = shell(job, name)
        assert request_answer(loop, job, "save") == "" and request.last_checkpoint(job.kept) == name
        left.over = True
        left.join()
    assert assert_resumed(loop, job)
    assert {each.id for each in Store(top, job.uid).manifests()} == {FIRST, "42.srv.0-5"}
    shell(job)
    assert request_answer(loop, job) == "" and request.last_checkpoint(job.kept) == job.key, (
        "the checkpoint that ends the job is not the last one"
    )
    assert recorded_actions.did()[-1] == "canceled"


def request_periodic(job, paths, wanted):
    """Let a job request periodic checkpoints; it started long ago."""
    job.kept.add_facts(started=0.0, walltime="00:10:00")
    plan = periodic._file(paths, job.key)
    plan.write_text(str(CHECKPOINT.parse(wanted)))
    os.utime(plan, (0, 0))
    return plan


@pytest.mark.parametrize("step", ["", "after manifest"])
def test_periodic_checkpoint_is_made_and_the_job_resumed(
    loop, paths, recorded_actions, top, shell, step
):
    job = started(paths)
    old = Store(top, job.uid)
    for at, name in enumerate(("42.srv.0-0", "42.srv.0-1")):
        (old.make(name) / "g0.memory").touch()
        finish(old, Manifest(name, job.uid, "ada", "n1", at, "micro", "00", {}, (), "42.srv"))
    recorded_actions.dies, plan = step, request_periodic(job, paths, "every:1h")
    shell(job, FIRST)
    assert assert_resumed(loop, job)
    assert not step or f"died {step}" in recorded_actions.did()
    eventually(lambda: loop.poll() or plan.stat().st_mtime > 0)
    assert [each.id for each in old.manifests()] == ["42.srv.0-1", FIRST], (
        "not the last two are kept"
    )
    for _ in range(3):
        loop.poll()
    assert recorded_actions.did().count("wait 0") == 1, "more than one checkpoint per interval"


def test_checkpoint_before_walltime_is_made_and_the_job_ends(
    loop, paths, recorded_actions, top, shell
):
    job = started(paths)
    request_periodic(job, paths, "before-walltime")
    shell(job)
    eventually(lambda: loop.poll() or "canceled" in recorded_actions.did())
    assert Store(top, job.uid).has(job.key)


def test_job_that_cannot_be_saved_periodically_continues(loop, paths, recorded_actions):
    job = started(paths, unsaveable=["PciDevice"])
    plan = request_periodic(job, paths, "every:1h")
    eventually(lambda: loop.poll() or plan.stat().st_mtime > 0)
    assert recorded_actions.did() == [] and phase(job) == "run"


def test_failed_checkpoint_is_removed_and_the_job_resumed(
    loop, paths, recorded_actions, top, shell
):
    job = started(paths)
    shell(job, FIRST)
    recorded_actions.fails = job.uuids[1]
    assert "No space left" in request_answer(loop, job, "save")
    assert assert_resumed(loop, job) and "canceled" not in recorded_actions.did()
    assert list((top / str(job.uid)).iterdir()) == []
    assert "the checkpoint has failed: save domain: No space left" in log_of(job)
    assert not (job.run_dir(0) / "tell.fifo").exists()


def test_silent_job_shell_fails_the_checkpoint_and_the_job_continues(
    loop, paths, recorded_actions, top
):
    job = started(paths)
    assert "the job shell has not sent" in request_answer(loop, job, "save")
    assert assert_resumed(loop, job) and list((top / str(job.uid)).iterdir()) == []


def test_watcher_killed_before_the_guest_waits_repeats_the_order(
    loop, paths, recorded_actions, top, shell
):
    """Otherwise the stream would break without a waiting side, and the job would be lost."""
    job = started(paths)
    shell(job)
    recorded_actions.dies = "wait 3600"
    assert request_answer(loop, job) == ""
    assert recorded_actions.did()[:3] == ["died wait 3600", "wait 3600", "suspend"]


def test_watcher_killed_before_the_guest_stops_waiting_repeats_the_order(
    loop, paths, recorded_actions, shell
):
    job = started(paths)
    shell(job)
    recorded_actions.fails, recorded_actions.dies = "all", "wait 0"
    assert "No space left" in request_answer(loop, job)
    assert assert_resumed(loop, job) and "died wait 0" in recorded_actions.did()


def test_full_disk_fails_the_checkpoint_and_the_job_continues(
    loop, paths, recorded_actions, top, shell
):
    job = started(paths)
    shell(job)
    recorded_actions.fails = "all"
    assert "No space left" in request_answer(loop, job)
    assert assert_resumed(loop, job)
    assert list((top / str(job.uid)).iterdir()) == []
    assert not (job.run_dir(0) / "leave.fifo").exists()
    assert "canceled" not in recorded_actions.did()


def test_failure_of_one_guest_resumes_all_guests(loop, paths, recorded_actions, top, shell):
    """The job was to end after the save, and the other guest was saved."""
    job = started(paths)
    shell(job)
    recorded_actions.fails = job.uuids[1]
    assert "No space left" in request_answer(loop, job)
    assert assert_resumed(loop, job) and not of(recorded_actions.did(), "canceled", "ended")
    assert list((top / str(job.uid)).iterdir()) == []


def no_space(path, *_args, **_more):
    if path.endswith("session"):
        raise OSError(errno.ENOSPC, "No space left on device")
    Path(path).write_bytes(_args[0])


def test_session_without_room_does_not_block_the_job(
    loop, paths, recorded_actions, top, shell, monkeypatch
):
    """The guests have ended: without a cancellation the job shell would wait until the walltime."""
    job = started(paths)
    shell(job)
    monkeypatch.setattr(checkpoint, "replace_file", no_space)
    assert "No space left" in request_answer(loop, job)
    assert "canceled" in recorded_actions.did() and "the job is canceled" in log_of(job)
    assert list((top / str(job.uid)).iterdir()) == []
    assert not (job.run_dir(0) / "leave.fifo").exists()


def test_failing_tool_is_reported_before_guests_are_paused(
    loop, paths, recorded_actions, shell, monkeypatch
):
    def fails(_cpu):
        raise HostFault("libvirtd --version: timed out after 10 s")

    job = started(paths)
    shell(job)
    monkeypatch.setattr(checkpoint.tools, "tools", fails)
    assert "timed out after 10 s" in request_answer(loop, job)
    assert phase(job) == "run" and recorded_actions.did() == []


def test_stopped_daemon_of_a_user_is_killed_and_fails_the_checkpoint(
    loop, paths, recorded_actions, shell, monkeypatch
):
    """QEMU waits for the daemon, libvirtd for QEMU, and the epilogue for the job's lock."""
    job = started(paths, guests=1)
    shell(job)
    lock = job.run_dir(0) / "fs-home.lock"
    lock.touch()
    with subprocess.Popen((sys.executable, "-c", HOLDS, lock), stdout=subprocess.PIPE) as daemon:
        assert daemon.stdout.readline() == b"locked\n"

        def save(*_, **_how):
            os.kill(daemon.pid, signal.SIGSTOP)
            stat = Path(f"/proc/{daemon.pid}/stat")
            eventually(lambda: stat.read_text().rpartition(")")[2].split()[0] == "Z")
            raise HostFault("save domain: the daemon has gone")

        monkeypatch.setattr(domains, "save_domain", save)
        said = request_answer(loop, job)
        assert daemon.wait(LONG) == -signal.SIGKILL
    assert "a process of yours stopped (SIGSTOP)" in said and "(fs-home)" in said
    assert assert_resumed(loop, job)


def test_job_suspended_by_its_batch_system_during_a_save_is_saved(
    loop, paths, recorded_actions, top, monkeypatch, shell
):
    """The stopped job shell sends its state after SIGCONT; its guests have ended."""
    job = started(paths)
    job_shell = shell(job)
    job_shell.leaves = False
    continued = threading.Event()

    def stopped(*_):
        return not continued.is_set() and any(
            each.startswith("saved") for each in recorded_actions.did()
        )

    def states(_ids, *, soon):
        return {job.id: JobState.SUSPENDED} if stopped() else {}

    monkeypatch.setattr(suspend, "is_shell_stopped", stopped)
    loop.batch = SimpleNamespace(known_states=states)
    said = []
    path = request.path_of(paths, job.key)
    thread = threading.Thread(
        target=lambda: said.append(request.ask(path, job.kept, "checkpoint", 60.0))
    )
    loop.poll()
    thread.start()
    says = "has not sent its session state in time: the job shell was stopped"
    eventually(lambda: loop.poll() or (job.key in loop.jobs and says in loop.jobs[job.key].said))
    assert phase(job) == "paused" and "canceled" not in recorded_actions.did()
    continued.set()
    monkeypatch.setattr(session, "_LEAVES", LONG)
    job_shell.leaves = True
    eventually(lambda: loop.poll() or said)
    thread.join()
    assert said == [""] and Store(top, job.uid).has(job.key)


@pytest.mark.parametrize("word", ["checkpoint", "suspend", "resume"])
def test_concurrent_request_is_refused_and_does_not_get_the_answer(
    loop, paths, recorded_actions, shell, monkeypatch, word
):
    """Otherwise the first requester would wait for an hour."""
    monkeypatch.setattr(session, "_LEAVES", LONG)
    job = started(paths)
    said = []
    path = request.path_of(paths, job.key)
    thread = threading.Thread(
        target=lambda: said.append(request.ask(path, job.kept, "checkpoint", 60.0))
    )
    loop.poll()
    thread.start()
    eventually(lambda: loop.poll() or phase(job) == "paused")
    assert "the job is being saved: wait until this is finished" in request_answer(loop, job, word)
    shell(job)
    eventually(lambda: loop.poll() or said)
    thread.join()
    assert said == [""]
    eventually(lambda: loop.poll() or recorded_actions.did()[-1] == "canceled")


def test_job_with_too_many_requests_is_not_saved(loop, paths, recorded_actions, monkeypatch):
    """Otherwise the user would wait for an answer that never comes."""
    job = started(paths)
    monkeypatch.setattr(watcher, "_MOST_PHASES", 3)
    assert "further requests are ignored" in request_answer(loop, job)
    loop.poll()
    assert recorded_actions.did() == [] and phase(job) == "run"


def test_checkpoint_that_takes_too_long_is_not_retried_forever(
    loop, paths, recorded_actions, shell, monkeypatch
):
    """Each attempt takes up to an hour, in which no epilogue can release the job."""
    job = started(paths)
    shell(job)

    def dies(step):
        if step == "before memory":
            asked = paths.job_state(job.key) / checkpoint.ASKED
            os.utime(asked, (1.0, 1.0))
            os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(checkpoint, "on_step", dies)
    assert "the job could not be saved within 3600 s" in request_answer(loop, job)
    assert assert_resumed(loop, job)


def test_checkpoint_of_an_earlier_job_with_this_id_is_not_overwritten(
    loop, paths, recorded_actions, top, shell
):
    """A batch system that was set up again, or has reached its last number, counts from 1 again."""
    job = started(paths)
    store = Store(top, job.uid)
    (store.make(job.key) / "g0.memory").write_bytes(b"another job's")
    finish(store, Manifest(job.key, job.uid, "ada", "n1", 1.0, "micro", "00", {}, ()))
    shell(job, FIRST)
    assert request_answer(loop, job) == ""
    assert (store.directory / job.key / "g0.memory").read_bytes() == b"another job's"
    assert store.has(FIRST)


def test_files_of_an_earlier_attempt_are_replaced(loop, paths, recorded_actions, top, shell):
    """An old disk with newer memory would be a broken file system."""
    job = started(paths)
    shell(job)
    part = Store(top, job.uid).make(job.key)
    for name in ("g0.disk", "g1.disk", "session"):
        (part / name).write_bytes(b"old")
    assert request_answer(loop, job) == ""
    place = top / str(job.uid) / job.key
    assert (place / "g1.disk").read_bytes() == b"disk 1"
    assert (place / "session").read_bytes() == b"session"


def test_job_shell_without_an_answer_fails_the_checkpoint(loop, paths, recorded_actions, top):
    job = started(paths)
    assert "the job shell has not sent" in request_answer(loop, job)
    assert assert_resumed(loop, job) and "canceled" not in recorded_actions.did()
    assert list((top / str(job.uid)).iterdir()) == []


@pytest.mark.parametrize("word", ["checkpoint", "save"])
def test_job_whose_script_is_not_running_is_not_saved(
    loop, paths, recorded_actions, top, shell, word
):
    """Another job shell could not continue vm_prologue or vm_epilogue."""
    job = started(paths)
    shell(job, tells=b"")
    assert "the job's script is not running: vm_prologue has not ended yet" in request_answer(
        loop, job, word
    )
    assert assert_resumed(loop, job) and "canceled" not in recorded_actions.did()
    assert list((top / str(job.uid)).iterdir()) == []
    assert not any((job.run_dir(0) / fifo).exists() for fifo in FIFOS)


def test_job_shell_that_dies_during_a_save_ends_the_job_without_a_checkpoint(
    loop, paths, recorded_actions, top, shell
):
    job = started(paths)
    shell(job).leaves = False
    assert "the job shell has not sent" in request_answer(loop, job)
    assert "canceled" in recorded_actions.did()
    assert list((top / str(job.uid)).iterdir()) == []


def test_requester_may_end_before_the_job(loop, paths, recorded_actions, top, shell, monkeypatch):
    """On Slurm the requester is a step of the job."""
    monkeypatch.setattr(checkpoint, "_GONE", LONG)
    job = started(paths)
    shell(job)
    program = (sys.executable, "-c", "input()")
    with subprocess.Popen(program, stdin=subprocess.PIPE) as asks:
        loop.poll()
        line = f"checkpoint 0123456789abcdef {asks.pid}\n".encode()
        send_line(paths, job, line)
        eventually(lambda: loop.poll() or request._read_answer(job.kept, "0123456789abcdef") == "")
        assert request.last_checkpoint(job.kept) == job.key and Store(top, job.uid).has(job.key)
        for _ in range(3):
            loop.poll()
        assert "canceled" not in recorded_actions.did() and (job.run_dir(0) / "leave.fifo").exists()
        asks.communicate(b"\n")
    eventually(lambda: loop.poll() or "canceled" in recorded_actions.did())


def writes(fifo, *parts):
    """Write like a process of the job's user, and close after each part."""
    for part in parts:
        descriptor = os.open(fifo, os.O_WRONLY)
        os.write(descriptor, part)
        os.close(descriptor)


@pytest.fixture
def fifo(tmp_path, monkeypatch):
    monkeypatch.setattr(session, "_LEAVES", 1.0)
    os.mkfifo(tmp_path / "leave.fifo")
    return tmp_path / "leave.fifo"


@pytest.mark.parametrize("part", [b"", b"\nhalf of a sess", b"its end\n", b"{" * 65536])
def test_incomplete_line_of_a_job_shell_is_read_with_a_timeout_and_without_polling(
    fifo, monkeypatch, part
):
    reads = []
    monkeypatch.setattr(
        session,
        "wait_readable",
        lambda *args: reads.append(args) or children.wait_readable(*args),
    )
    thread = threading.Thread(target=writes, args=(fifo, part))
    thread.start()
    with pytest.raises(HostFault, match="has not sent"):
        session.read_state(fifo)
    thread.join()
    assert len(reads) < 100, "the reader polls a FIFO without a writer in a busy loop"


def test_endless_writer_is_read_with_a_timeout(fifo):
    over = threading.Event()

    def drips():
        with fifo.open("wb", buffering=0) as file, contextlib.suppress(BrokenPipeError):
            while not over.is_set():
                file.write(b"x")

    thread = threading.Thread(target=drips)
    thread.start()
    with pytest.raises(HostFault, match="has not sent"):
        session.read_state(fifo)
    over.set()
    thread.join()


def test_line_after_a_cut_line_is_complete(fifo):
    parts = (b"\nhalf of a sess", b"", b"\nsession\n")
    thread = threading.Thread(target=writes, args=(fifo, *parts))
    thread.start()
    assert session.read_state(fifo) == b"session"
    thread.join()


def test_checkpoint_without_enough_free_space_is_not_started(
    loop, paths, recorded_actions, monkeypatch, top
):
    job = started(paths)
    free = SimpleNamespace(free=600 << 20)
    monkeypatch.setattr(room.shutil, "disk_usage", lambda _: free)
    assert "the checkpoint needs up to 640M in" in request_answer(loop, job)
    assert assert_resumed(loop, job)
    assert not any(line.startswith("saved") for line in recorded_actions.did())


def test_checkpoint_above_the_quota_of_the_user_is_refused(paths, recorded_actions, top):
    loop = made(paths, Settings(checkpoints=str(top), checkpoint_quota=700))
    job = started(paths)
    old = top / str(job.uid) / "41.srv.0"
    old.mkdir(parents=True)
    (old / "g0.memory").write_bytes(b"x" * (100 << 20))
    said = request_answer(loop, job)
    assert "but 100M of your quota of 700M are in use ([plugin.survive] checkpoint_quota)" in said
    assert assert_resumed(loop, job)
    shut(loop)


def test_checkpoint_of_too_many_jobs_of_a_user_is_refused(paths, recorded_actions, top):
    """Each reserves addresses that no other guest gets in the meantime."""
    loop = made(paths, Settings(checkpoints=str(top), max_checkpointed_jobs=2))
    job = started(paths)
    store = Store(top, job.uid)
    for name in ("40.srv.0", "41.srv.0", "41.srv.0-3"):
        store.make(name)
        of = name.partition(".0")[0]
        finish(store, Manifest(name, job.uid, "ada", "n1", 1.0, "micro", "00", {}, (), of))
    said = request_answer(loop, job)
    assert (
        "2 jobs of yours already have checkpoints, and the limit is 2 ([plugin.survive] max_"
        in said
    )
    assert assert_resumed(loop, job)
    shut(loop)


def test_as_many_jobs_as_the_limit_may_have_checkpoints(paths, top):
    store, name = Store(top, started(paths).uid), "40.srv.0"
    store.make(name)
    finish(store, Manifest(name, store.uid, "ada", "n1", 1.0, "micro", "00", {}, (), "40.srv"))
    room.require_few(store, "42.srv", Settings(max_checkpointed_jobs=2))
    room.require_few(store, "42.srv", Settings(max_checkpointed_jobs=0))  # no limit
    with pytest.raises(Refused, match="1 jobs of yours"):
        room.require_few(store, "42.srv", Settings(max_checkpointed_jobs=1))


def test_space_reserved_for_other_users_is_not_used(paths, recorded_actions, monkeypatch, top):
    """Two users save a job at once; either checkpoint would fit alone."""
    free = SimpleNamespace(free=1000 << 20)
    monkeypatch.setattr(room.shutil, "disk_usage", lambda _: free)
    settings = Settings(checkpoints=str(top))
    one, two = started(paths), started(paths, job_id="43.srv")
    guests = [GuestData(guest, (), Path("/"), None) for guest in running(paths, one).guests]
    theirs, mine = Store(top, one.uid + 1), Store(top, two.uid)
    part = theirs.make(one.key)
    with theirs.hold_lock():
        room.require_room(theirs, part, guests, settings)
    (part / "g0.memory").write_bytes(b"x" * (100 << 20))
    free.free -= 100 << 20
    with mine.hold_lock(), pytest.raises(HostFault, match=r"needs up to 640M .* which has 360M"):
        room.require_room(mine, mine.make(two.key), guests, settings)
    theirs.drop(one.key)
    room.require_room(mine, mine.part(two.key), guests, settings)


def test_reservations_of_a_dead_node_expire(paths, recorded_actions, top):
    """All nodes share the directory; the dead node removes its files when it is back."""
    job = started(paths)
    guests = [GuestData(guest, (), Path("/"), None) for guest in running(paths, job).guests]
    store = Store(top, job.uid)
    part = store.make(job.key)
    room.require_room(store, part, guests, Settings(checkpoints=str(top)))
    assert store.used_bytes() == store.reserved_bytes() == 640 << 20
    for path in (part, *part.iterdir()):
        os.utime(path, (0, 0))
    assert store.used_bytes() == store.reserved_bytes() == 0
    assert part.is_dir()
    for left in (store.lost_path(job.key), store.directory / f".{job.key}.gone"):
        part = part.rename(left)  # abandoned by a node, and removed by a node when it was killed
        os.utime(part)
        assert store.used_bytes() == 640 << 20
        os.utime(part, (0, 0))
        assert store.used_bytes() == 0


def test_checkpoint_larger_than_reserved_is_removed(
    loop, paths, recorded_actions, top, shell, monkeypatch
):
    """A guest's memory file also has the state of a daemon, which may have many open files."""
    monkeypatch.setattr(room, "_OVERHEAD", -256)
    job = started(paths)
    shell(job)
    assert "but only 0M were reserved" in request_answer(loop, job, "save")
    assert assert_resumed(loop, job) and list((top / str(job.uid)).iterdir()) == []


def test_concurrent_checkpoints_of_a_user_share_the_quota(paths, recorded_actions, top, shell):
    """Either checkpoint would fit alone; its maximum size is reserved before it is written."""
    settings = Settings(checkpoints=str(top), checkpoint_quota=700)
    one, two = started(paths), started(paths, job_id="43.srv")
    store, part = Store(top, one.uid), Store(top, one.uid).make(one.key)
    guests = [GuestData(guest, (), Path("/"), None) for guest in running(paths, one).guests]
    with store.hold_lock():
        room.require_room(store, part, guests, settings)
        room.require_room(store, part, guests, settings)  # after a kill
    with pytest.raises(Refused, match="640M of your quota of 700M are in use"):
        room.require_room(store, store.make(two.key), guests, settings)
    assert store.used_bytes() == 640 << 20
    store.drop(one.key)
    room.require_room(store, store.part(two.key), guests, settings)


def running(paths, job):
    return next(each for each in RunningJobs(paths).jobs() if each.job.key == job.key)


def shut(loop):
    for watched in loop.jobs.values():
        watched.close()


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"unsaveable": ["PciDevice", "Filesystem"]}, "on this node: PciDevice, Filesystem"),
        ({"nodes": ["n1", "n2"]}, "nodes do not share the checkpoints"),
        ({"unsaveable": None}, "cannot save jobs"),
    ],
)
def test_job_that_cannot_be_saved_continues_with_a_reason(
    loop, paths, recorded_actions, facts, said
):
    job = started(paths, **facts)
    assert said in request_answer(loop, job)
    loop.poll()
    assert recorded_actions.did() == [] and phase(job) == "run"


def test_site_without_a_checkpoint_directory_refuses(paths, recorded_actions):
    loop = made(paths, Settings())
    assert "checkpoints are disabled" in request_answer(loop, started(paths))
    shut(loop)


def test_suspended_job_must_be_resumed_before_a_checkpoint(loop, paths, recorded_actions):
    job = started(paths)
    assert request_answer(loop, job, "suspend") == ""
    assert "resume it first" in request_answer(loop, job)


def test_manifest_is_read_back_and_checked(loop, paths, recorded_actions, shell, top):
    job = started(paths, guests=1)
    shell(job)
    request_answer(loop, job)
    store = Store(top, job.uid)
    found = store.read(job.key)
    assert Manifest.decode(found.encode(), store.directory / job.key) == found
    assert [each.id for each in store.manifests()] == [job.key]
    path = store.directory / job.key / MANIFEST
    for broken in (b"", b"[]", b'{"schema": 1}', path.read_bytes()[:-9]):
        path.write_bytes(broken)
        with pytest.raises(HostFault, match="invalid checkpoint manifest"):
            store.read(job.key)
    path.write_text(json.dumps({**json.loads(found.encode()), "uid": 7}))
    with pytest.raises(HostFault, match="uid 7"):
        store.read(job.key)
    with pytest.raises(Refused, match="no checkpoint 1"):
        store.read("1")


def test_holes_of_a_disk_are_preserved(tmp_path):
    source, to = tmp_path / "a", tmp_path / "b"
    with source.open("wb") as file:
        file.write(b"begin")
        file.seek(64 << 20)
        file.write(b"middle")
        file.truncate(128 << 20)
    with source.open("rb") as reads, to.open("wb") as writes:
        copy_data(reads.fileno(), writes.fileno())
    assert to.read_bytes() == source.read_bytes()
    assert to.stat().st_blocks * 512 < 1 << 20


def test_disk_is_copied_to_another_file_system(tmp_path, monkeypatch):
    """copy_file_range(2) has refused that since Linux 5.19."""
    here = tmp_path / "a"
    with here.open("wb") as file:
        file.write(b"x" * (3 << 20))
        file.seek(8 << 20)
        file.write(b"end")

    def refuses(*_):
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "copy_file_range", refuses)
    with here.open("rb") as reads, (tmp_path / "b").open("wb") as writes:
        copy_data(reads.fileno(), writes.fileno())
    assert (tmp_path / "b").read_bytes() == here.read_bytes()


def test_only_memory_files_finished_by_libvirt_are_complete(tmp_path):
    file = tmp_path / "m"
    assert not tools.is_whole(file)
    file.write_bytes(b"LibvirtQemudPart")
    assert not tools.is_whole(file)
    file.write_bytes(b"LibvirtQemudSave...")
    assert tools.is_whole(file)


# -- A job on two nodes ----------------------------------------------------------------------------


class Both:
    """A job on two nodes with two guests each; the nodes' watchers run alternately."""

    def __init__(self, tmp_path, top):
        self.settings = Settings(checkpoints=str(top), checkpoints_shared=True, query_interval=0.5)
        self.places = [running_journal.paths_below(tmp_path / name) for name in ("n1", "n2")]
        self.paths, self.top, self.dead = self.places[0], top, ()
        self.loops = [made(paths, self.settings) for paths in self.places]
        nodes = {"nodes": ["n1", "n2"]}
        self.job, self.other = (
            started(paths, where=(f"n{number + 1}", 2 * number), **nodes)
            for number, paths in enumerate(self.places)
        )

    @property
    def jobs(self):
        return (self.job, self.other)

    def poll(self):
        for number, loop in enumerate(self.loops):
            POLLED[0] = f"n{number + 1}"
            if POLLED[0] not in self.dead:
                loop.poll()
        POLLED[0] = ""

    def ask(self, word="checkpoint"):
        said = []
        path = request.path_of(self.paths, self.job.key)
        asks = threading.Thread(
            target=lambda: said.append(request.ask(path, self.job.kept, word, 60.0))
        )
        self.poll()
        asks.start()
        eventually(lambda: self.poll() or said)
        asks.join()
        return said[0]

    def kill(self, number):
        """Kill one node's watcher, and start another one."""
        for watched in self.loops[number].jobs.values():
            if watched.change is not None:
                os.killpg(watched.change.pid, signal.SIGKILL)
                watched.change.wait()
        shut(self.loops[number])
        self.loops[number] = made(self.places[number], self.settings)

    def all_run(self):
        eventually(lambda: self.poll() or [phase(job) for job in self.jobs] == ["run", "run"])
        return True


@pytest.fixture
def both(tmp_path, recorded_actions, top):
    (top / shared_store.SEEN).touch()
    found = Both(tmp_path, top)
    yield found
    for loop in found.loops:
        shut(loop)


def of(did, *words):
    return [index for index, line in enumerate(did) if line.split()[0] in words]


def test_two_nodes_save_a_job_together_and_the_job_ends(both, recorded_actions, top, shell):
    shell(both.job)
    assert both.ask() == ""
    eventually(lambda: both.poll() or "canceled" in recorded_actions.did())
    did = recorded_actions.did()
    assert len(of(did, "suspend")) == len(of(did, "saved")) == 4
    assert max(of(did, "suspend")) < min(of(did, "saved")), (
        "a guest was saved before all guests were paused"
    )
    assert did[max(of(did, "saved")) + 1 :] == [f"ended {both.job.uuids[0]}", "canceled"]
    found = Store(top, both.job.uid).read(both.job.key)
    assert [guest.uuid for guest in found.guests] == both.job.uuids + both.other.uuids
    assert [g.uuid for g in found.node_part(1).guests] == both.other.uuids and found.nodes == 2
    place = top / str(both.job.uid) / both.job.key
    assert [(place / f"g{rank}.disk").read_bytes() for rank in range(4)] == [
        b"disk 0", b"disk 1"] * 2  # fmt: skip
    assert all(tools.is_whole(guest.memory) for guest in found.guests)
    assert (place / "session").read_bytes() == b"session"
    assert not list(place.glob("reserved*")) and place.stat().st_mode & 0o077 == 0
    for _ in range(3):
        both.poll()
    assert phase(both.other) == "paused" and recorded_actions.did() == did, (
        "a watcher saved the job again"
    )


def test_two_nodes_save_a_job_together_and_the_job_resumes(both, recorded_actions, top, shell):
    shell(both.job, FIRST)
    assert both.ask("save") == "" and both.all_run()
    eventually(lambda: both.poll() or "wait 0" in recorded_actions.did())
    did = recorded_actions.did()
    assert max(of(did, "suspend")) < min(of(did, "saved"))
    assert len(of(did, "resume")) == 4 and not of(did, "ended", "canceled")
    assert [path.name for path in (top / str(both.job.uid)).iterdir()] == [FIRST]
    assert both.ask("save") == "", "the job cannot be saved twice"


def test_two_nodes_save_a_job_together_periodically(both, recorded_actions, shell):
    """Only the first node acts on the job's request for periodic checkpoints."""
    shell(both.job, FIRST)
    plans = [
        request_periodic(job, paths, "every:1h")
        for job, paths in zip(both.jobs, both.places, strict=True)
    ]
    store = Store(both.top, both.job.uid)
    eventually(lambda: both.poll() or store.has(FIRST))
    assert both.all_run() and len(of(recorded_actions.did(), "saved")) == 4
    assert plans[0].stat().st_mtime > 0 == plans[1].stat().st_mtime


TOGETHER = [*STEPS[:-2], "before still", "after still", "before end", "after end"]
FIRSTS = ("session", "finish", "end")  # steps of the first node only


@pytest.mark.parametrize(
    ("step", "node"),
    sparing.each(
        9,
        [(step, "n1") for step in TOGETHER]
        + [(step, "n2") for step in TOGETHER if step.split()[1] not in FIRSTS],
    ),
)
def test_watcher_killed_at_each_step_on_either_node_still_saves_the_job(
    both, recorded_actions, top, shell, step, node
):
    shell(both.job)
    recorded_actions.dies, recorded_actions.on = step, node
    assert both.ask() == ""
    eventually(lambda: both.poll() or "canceled" in recorded_actions.did())
    assert f"died {step}" in recorded_actions.did()
    found = Store(top, both.job.uid).read(both.job.key)
    assert len(found.guests) == 4 and all(tools.is_whole(guest.memory) for guest in found.guests)
    assert [path.name for path in (top / str(both.job.uid)).iterdir()] == [both.job.key]


@pytest.mark.parametrize("node", ["n1", "n2"])
@pytest.mark.parametrize(
    "step",
    [
        "after memory",
        *(
            pytest.param(each, marks=pytest.mark.full)
            for each in ("after still", "after disk", "after manifest")
        ),
    ],
)
def test_dead_node_leaves_no_checkpoint_and_no_paused_guest(
    both, recorded_actions, top, shell, monkeypatch, step, node
):
    """The other node's guests resume after a timeout, the dead node's by its next watcher."""
    monkeypatch.setattr(checkpoint, "_ANSWERS", 1.5)
    monkeypatch.setattr(checkpoint, "_FIRST", -24.0)  # 1.6 s for 256 MiB
    monkeypatch.setattr(checkpoint, "_SAYS", 1.0)
    shell(both.job)
    recorded_actions.dies, recorded_actions.on = step, node
    number = int(node[1]) - 1
    both.poll()
    send_line(both.paths, both.job, b"checkpoint 0123456789abcdef 0\n")
    eventually(lambda: both.poll() or f"died {step}" in recorded_actions.did())
    both.kill(number)
    both.dead = (node,)
    eventually(lambda: both.poll() or phase(both.jobs[1 - number]) == "run")
    both.dead = ()
    assert both.all_run()
    eventually(lambda: both.poll() or "wait 0" in recorded_actions.did())
    assert "canceled" not in recorded_actions.did() and not of(recorded_actions.did(), "ended")
    store = Store(top, both.job.uid)
    assert list(store.manifests()) == []
    shell(both.job, FIRST)
    assert both.ask("save") == "", "no later checkpoint can be made"


def test_killed_first_node_is_awaited_after_its_guest_has_ended(
    both, recorded_actions, top, shell, monkeypatch
):
    """If another node abandoned the save, the job could neither continue nor be restored."""
    monkeypatch.setattr(checkpoint, "_ANSWERS", 0.5)
    monkeypatch.setattr(checkpoint, "_FIRST", -25.1)  # 0.5 s for 256 MiB
    monkeypatch.setattr(checkpoint, "_SAYS", 0.5)
    shell(both.job)
    recorded_actions.dies, recorded_actions.on = "after end", "n1"
    both.poll()
    send_line(both.paths, both.job, b"checkpoint 0123456789abcdef 0\n")
    eventually(lambda: both.poll() or "died after end" in recorded_actions.did())
    both.kill(0)
    both.dead = ("n1",)
    over = time.monotonic() + 4.0
    eventually(lambda: both.poll() or time.monotonic() > over)
    store = Store(top, both.job.uid)
    assert not (store.part(both.job.key) / WHY).exists(), "n2 has abandoned the save"
    both.dead = ()
    eventually(lambda: both.poll() or "canceled" in recorded_actions.did())
    assert len(store.read(both.job.key).guests) == 4


def test_late_failure_of_a_node_is_withdrawn_when_a_guest_has_ended(top, both):
    """Either node may be the first to finish its part."""
    store = Store(top, both.job.uid)
    n1, n2 = (NodePart(store, FIRST, ("n1", "n2"), number) for number in (0, 1))
    n1.make()
    n1.end()
    n2.abandon(HostFault("too late"))
    n1.end()
    assert store.part(FIRST).exists() and not store.lost_path(FIRST).exists()
    store.drop(FIRST)
    n1.make()
    n2.abandon(HostFault("too late"))
    with pytest.raises(HostFault):
        n1.end()
    assert not store.part(FIRST).exists()


def test_failing_node_is_named_and_all_guests_resume(both, recorded_actions, top, shell):
    shell(both.job)
    recorded_actions.fails = both.other.uuids[1]
    assert both.ask() == "n2: save domain: No space left on device"
    assert both.all_run() and list((top / str(both.job.uid)).iterdir()) == []
    assert not of(recorded_actions.did(), "ended", "canceled")
    recorded_actions.fails = both.job.uuids[0]
    shell(both.job)
    assert both.ask() == "save domain: No space left on device"
    assert both.all_run() and list((top / str(both.job.uid)).iterdir()) == []


def test_unresponsive_node_is_named_and_all_guests_resume(
    both, recorded_actions, top, shell, monkeypatch
):
    monkeypatch.setattr(checkpoint, "_ANSWERS", 1.0)
    shell(both.job)
    both.dead = ("n2",)
    assert both.ask() == "n2: the guests are not paused"
    assert phase(both.other) == "run"
    both.dead = ()
    assert both.all_run() and list((top / str(both.job.uid)).iterdir()) == []


def test_node_with_other_tool_versions_is_named(both, recorded_actions, top, shell, monkeypatch):
    def others(cpu=""):
        return {"QEMU": "10.0.13" if POLLED[0] != "n2" else "10.0.14"}

    monkeypatch.setattr(checkpoint.tools, "tools", others)
    shell(both.job)
    said = both.ask()
    assert said.startswith("n2: a job on both this node and n1 cannot be saved") and both.all_run()


def test_request_file_that_others_can_write_is_ignored(both, recorded_actions):
    part = Store(both.top, both.job.uid).make(both.job.key)
    (part / "asks.json").write_text('{"ends": true, "tools": {}}')
    part.chmod(0o777)
    reader = node_parts.RequestReader(both.settings)
    results = []

    def wanted():
        results.append(reader.find_request(running(both.places[1], both.other)))
        return results[-1]

    eventually(lambda: wanted() or (len(results) > 1 and reader._lines._asking is None))
    assert set(results) == {None}
    part.chmod(0o700)
    eventually(wanted)
    assert results[-1] == (both.job.key, True)


def test_checkpoint_must_be_requested_on_the_first_node(both, recorded_actions):
    path = request.path_of(both.places[1], both.other.key)
    said = []
    asks = threading.Thread(
        target=lambda: said.append(request.ask(path, both.other.kept, "save", 60.0))
    )
    both.poll()
    asks.start()
    eventually(lambda: both.poll() or said)
    asks.join()
    assert said == ["this is not the job's first node: use the first node or a submit host"]


def test_several_nodes_are_not_saved_if_the_batch_system_sees_only_one(
    both, recorded_actions, monkeypatch
):
    batch = SimpleNamespace(knows_all_nodes=False)
    monkeypatch.setattr(checkpoint.service, "batch_system", lambda _: (None, batch))
    assert "jobs on several nodes cannot be saved on this batch system" in both.ask()
    assert both.all_run() and not of(recorded_actions.did(), "suspend")
