"""Checkpoints on a shared file system: owners of guests, and reserved addresses."""

import dataclasses
import errno
import json
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

import running_journal
from finished import finish, saved_guest
from patience import LONG
from vtorque_core.api import HostFault, InUse, JobAttempt, Paths, Refused
from vtorque_core.api.batch_system import JobState
from vtorque_core.api.claims import PoolClaim
from vtorque_core.resources.lease import Lease
from vtorque_survive import listing, restore, shared_store, stored
from vtorque_survive.settings import Settings
from vtorque_survive.stored import Manifest, Store
from vtorque_testing import planned

UUID = "0b1ad9ba-95f3-54cf-8d96-1d6ed3e4ac1f"
LEASED = (("address", "10.86.0.16"), ("address-fast", "10.87.0.16"))
HERE = JobAttempt("9.srv", 0, "ada", os.getuid(), "n2")


def manifest(store, key="42.srv.0", leased=LEASED, uuid=UUID):
    guest = saved_guest(uuid, leased)
    found = Manifest(key, store.uid, "ada", "n1", 1.0, "micro", "ab" * 32, {}, (guest,), "42.srv")
    store.make(key)
    finish(store, found)
    return found


@pytest.fixture
def store(tmp_path):
    top = tmp_path / "checkpoints"
    top.mkdir(mode=0o700)
    (top / shared_store.SEEN).touch()
    return Store(top, os.getuid())


class SharedSite(dict):
    path = Path("x.toml")
    paths = Paths(Path("/none"), Path("/none"))


@pytest.fixture
def site(store):
    return SharedSite({Settings: Settings(checkpoints=str(store.top), checkpoints_shared=True)})


@pytest.fixture
def alive(monkeypatch):
    """Make these jobs known to the batch system; ``asked`` has its queries."""
    lives = {}
    asked = []

    def answer(ids):
        asked.extend(ids)
        return {each: lives.get(each, JobState.GONE) for each in ids}

    moves = dict.fromkeys(("reserve_node", "release_node", "is_reserved", "remove_node"), print)
    moves["has_ended"] = lambda job_id, _attempt: f"{job_id} over" in lives
    adapter = SimpleNamespace(job_states=answer, **moves)
    batch = SimpleNamespace(node=lambda _: adapter, knows_all_nodes=True)
    monkeypatch.setattr(shared_store.service, "batch_system", lambda _: (None, batch))
    monkeypatch.setattr(shared_store, "_OVER", 0.0)
    lives["asked"] = asked
    return lives


def test_job_acquires_the_guests_of_an_ended_job(store, site, alive):
    found = manifest(store)
    mine = shared_store.acquire_mark(store, found, HERE, site)
    mine.create()
    said = json.loads(Path(mine.path).read_text())
    assert said.pop("leased") == [list(each) for each in LEASED]
    mine_is = {"job": "9.srv", "key": "9.srv.0", "node": "n2", "checkpoint": found.id}
    assert said == mine_is
    assert alive["asked"] == ["42.srv"], "other jobs were queried"
    mine.create()
    for _ in range(2):
        mine.release()
        assert not Path(mine.path).exists()


@pytest.mark.parametrize("life", [JobState.ALIVE, JobState.SUSPENDED, JobState.UNKNOWN])
def test_guests_of_a_job_that_may_still_run_are_a_host_fault(store, site, alive, life):
    found = manifest(store)
    alive["42.srv"] = life
    with pytest.raises(HostFault, match=r"in use by job 42.srv on n1") as raised:
        shared_store.acquire_mark(store, found, HERE, site)
    assert not raised.value.blames_node


def test_second_job_that_restores_the_same_guests_is_refused(store, site, alive):
    found = manifest(store)
    other = JobAttempt("10.srv", 0, "ada", os.getuid(), "n3")
    mine, theirs = (shared_store.acquire_mark(store, found, job, site) for job in (HERE, other))
    theirs.create()
    with pytest.raises(HostFault, match=r"in use by job 10.srv on node n3"):
        mine.create()
    mine.release()
    alive["10.srv"] = JobState.ALIVE
    with pytest.raises(HostFault, match=r"in use by job 10.srv on n3"):
        shared_store.acquire_mark(store, found, HERE, site)
    del alive["10.srv"]
    mine = shared_store.acquire_mark(store, found, HERE, site)
    mine.create()
    theirs.release()
    assert json.loads(Path(mine.path).read_text())["job"] == "9.srv"


def test_requeued_job_acquires_its_guests_again(store, site, alive):
    """The last node may be dead, and the batch system reports this attempt of the job as alive."""
    found = manifest(store)
    alive["42.srv"] = JobState.ALIVE
    jobs = [JobAttempt("42.srv", n, "ada", os.getuid(), f"n{n + 1}") for n in (1, 2)]
    first, second = (shared_store.acquire_mark(store, found, job, site) for job in jobs)
    first.create()
    second.create()
    first.release()
    assert json.loads(Path(second.path).read_text())["key"] == "42.srv.2"
    assert alive["asked"] == []


NODES = ("n1", "n2")


@pytest.fixture
def gates(store, site, alive):
    """Two nodes of a restored job, each with two guests."""
    guests = tuple(saved_guest(UUID.replace("0b1", f"0b{n}"), LEASED) for n in range(4))
    found = dataclasses.replace(manifest(store), guests=guests, nodes=2)
    jobs = [JobAttempt("9.srv", 0, "ada", os.getuid(), node) for node in NODES]
    files = [
        shared_store.acquire_mark(store, found.node_part(n), job, site)
        for n, job in enumerate(jobs)
    ]
    for file in files:
        file.create()
    assert len({file.path for file in files}) == 2
    both = [shared_store.Gate(store, found, NODES, job, site) for job in jobs]
    return SimpleNamespace(both=both, files=files, failed=threading.Event())


def waiting(gates, node, seconds=60.0):
    """Let a guest of a node wait at the gate; return its thread and its messages."""
    said = []

    def wait():
        try:
            gates.both[node](time.monotonic() + seconds, gates.failed)
            said.append("runs")
        except InUse as error:  # a failure of another node
            said.append(str(error))
        except HostFault as error:
            said.append(f"fault: {error}")

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread, said


def test_no_guest_runs_before_all_nodes_are_ready(gates):
    begun = [waiting(gates, node) for node in (0, 0, 1)]
    time.sleep(0.5)
    assert [said for _, said in begun] == [[], [], []]
    begun.append(waiting(gates, 1))
    for thread, _ in begun:
        thread.join(LONG)
    assert [said for _, said in begun] == [["runs"]] * 4


def test_nodes_are_checked_again_before_the_guests_run(gates, monkeypatch):
    """One node may have timed out before another node is ready."""
    missing, looks = shared_store.Gate._missing_nodes, []

    def at_first_none(gate, seen):
        looks.append(gate)
        return [] if len(looks) < 3 else missing(gate, seen)

    monkeypatch.setattr(shared_store.Gate, "_missing_nodes", at_first_none)
    monkeypatch.setattr(shared_store.Gate, "_recheck_missing", lambda gate: missing(gate, set()))
    begun = [waiting(gates, 1, 0.5) for _ in range(2)]
    for thread, said in begun:
        thread.join(LONG)
        assert "the job's guests on n1" in said[0]


def test_nodes_with_different_checkpoints_do_not_run(gates):
    said = json.loads(Path(gates.files[1].path).read_text())
    Path(gates.files[1].path).write_text(json.dumps(said | {"checkpoint": "42.srv.0-7"}))
    thread, said = waiting(gates, 0)
    thread.join(LONG)
    assert "42.srv.0-7 on n2" in said[0]


def test_node_that_timed_out_is_not_awaited(gates):
    """The last guest is ready after the other node has timed out, and does not run either."""
    others = [waiting(gates, 0, 0.3) for _ in range(2)]
    for thread, said in others:
        thread.join(LONG)
        assert "n2 did not become ready in time" in said[0]
    late = [waiting(gates, 1, 0.5) for _ in range(2)]
    for thread, said in late:
        thread.join(LONG)
        assert "the job's guests on n1" in said[0]


def test_failed_start_of_another_node_or_guest_is_reported(gates, alive, monkeypatch):
    monkeypatch.setattr(shared_store, "_POLL", 0.2)
    first = [waiting(gates, 0) for _ in range(2)]
    time.sleep(0.3)
    gates.files[1].release()
    for thread, said in first:
        thread.join(LONG)
        assert said == ["the job's start on n2 has failed"]
    alive["9.srv over"] = True
    thread, said = waiting(gates, 0)
    thread.join(LONG)
    assert said == ["the job has ended or is being restarted by the batch system"]
    gates.failed.set()
    thread, said = waiting(gates, 1)
    thread.join(LONG)
    assert said == ["fault: another guest of the job has failed"]


def test_hanging_shared_directory_times_out_with_its_name(
    store, site, alive, monkeypatch, tmp_path
):
    """The start does not hold the node's lock in the meantime."""
    site.paths = running_journal.paths_below(tmp_path)
    monkeypatch.setattr(shared_store, "_READ", 0.2)
    monkeypatch.setattr(shared_store, "_write_addresses", lambda *_: time.sleep(600))
    with pytest.raises(HostFault, match=r"all nodes share: timed out after 0.2 s") as raised:
        list(shared_store.reserved_addresses([planned.guest_plan()], site))
    assert raised.value.stage == "checkpoints' directory"


def test_address_of_a_local_guest_is_reserved_for_its_checkpoint(store, site, alive, tmp_path):
    """A job may be saved and released between the read of the directory and the node's lock."""
    site.paths = running_journal.paths_below(tmp_path)
    job = running_journal.JournalledJob(site.paths, "42.srv")
    leases = [(Lease("address", "10.86.0.20"), 0), (Lease("core", "3"), 0)]
    job.journal.acquire_leases(leases, phase="plan")
    found = list(shared_store.reserved_addresses([planned.guest_plan()], site))
    assert found == [PoolClaim("address", ("10.86.0.20",))]


def test_addresses_of_checkpoints_are_reserved(store, site, alive, tmp_path):
    manifest(store)
    manifest(store, "43.srv.0", (("address", "10.86.0.17"),), UUID.replace("0", "1"))
    store.make("44.srv.0")  # unfinished
    (store.top / "lost+found").mkdir()

    def away(guests, site):
        return [
            (claim.pool, *claim.items) for claim in shared_store.reserved_addresses(guests, site)
        ]

    booted = planned.guest_plan()
    site.paths = running_journal.paths_below(tmp_path)
    assert set(away([booted], site)) == {*LEASED, ("address", "10.86.0.17")}
    was = saved_guest(UUID, LEASED)
    restored = dataclasses.replace(booted, source=restore.CheckpointSource(was))
    assert list(away([restored], site)) == [("address", "10.86.0.17")]
    alone = SharedSite({Settings: Settings(checkpoints=str(store.top))})
    assert list(away([booted], alone)) == []
    gone = SharedSite({Settings: Settings(checkpoints="/none", checkpoints_shared=True)})
    with pytest.raises(HostFault, match=r"/none/.vtorque-checkpoints: No such file.*not mounted"):
        list(away([booted], gone))


def reserved(site):
    return [(claim.pool, *claim.items) for claim in shared_store.reserved_addresses([], site)]


def test_restored_guest_keeps_its_address_when_its_checkpoint_is_removed(store, site, alive):
    found = manifest(store)
    mine = shared_store.acquire_mark(store, found, HERE, site)
    mine.create()
    listing.remove(store, found.id)
    assert {*reserved(site)} == {*LEASED}
    mine.release()
    assert reserved(site) == []


def test_unreadable_checkpoint_is_not_taken_as_missing(store, site, alive, monkeypatch):
    manifest(store)

    def broken(_):
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(stored, "_content", broken)
    with pytest.raises(HostFault, match="Stale file handle") as raised:
        reserved(site)
    assert not raised.value.blames_node


def test_unmounted_directory_is_not_taken_as_empty(store, site, alive):
    (store.top / shared_store.SEEN).unlink()
    for looks in (reserved, lambda _: shared_store.require_private(site[Settings])):
        with pytest.raises(HostFault, match="is not mounted on this node, or this file is missing"):
            looks(site)


def test_restore_on_other_nodes_needs_a_batch_system_that_knows_all_nodes(store, site, alive):
    assert shared_store.is_shared_by_nodes(site)
    shared_store.service.batch_system("")[1].knows_all_nodes = False
    assert not shared_store.is_shared_by_nodes(site) and reserved(site) == []


MOUNTS = """\
22 1 254:1 / / rw - ext4 /dev/vda rw
30 22 0:40 / /srv rw,relatime shared:2 - nfs4 server:/srv rw
31 30 0:41 / /srv/my\\040own rw - tmpfs none rw
32 22 0:42 / /home rw - fuse.sshfs ada@x: rw
"""


def test_file_system_type_is_detected(tmp_path):
    real = tmp_path.resolve()
    on = {"ext4": "/", "nfs4": "/srv", "tmpfs": "/srv/my own", "fuse.sshfs": "/home"}
    for kind, point in on.items():
        text = MOUNTS.replace(f" {point.replace(' ', chr(92) + '040')} ", f" {real} ", 1)
        assert shared_store.file_system(tmp_path, text) == kind
    assert shared_store.file_system(Path("/proc/self")) == "proc"
    with pytest.raises(HostFault, match="No such file"):
        shared_store.file_system(tmp_path / "none")


def test_file_system_visible_to_other_hosts_needs_checkpoints_shared(tmp_path, monkeypatch):
    shared_store.require_private(Settings(checkpoints=str(tmp_path)))
    with pytest.raises(Refused, match=r"type proc.*in plain text.*checkpoints_shared = true"):
        shared_store.require_private(Settings(checkpoints="/proc"))
    monkeypatch.setattr(shared_store, "require_mounted", lambda _: None)
    shared_store.require_private(Settings(checkpoints="/proc", checkpoints_shared=True))


def test_files_renamed_by_other_nodes_are_not_an_error(tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes(b"1" * 4096)
    listed = [tmp_path / "gone", tmp_path / "a"]
    monkeypatch.setattr(Path, "iterdir", lambda _: iter(listed))
    assert stored.disk_usage(tmp_path) == (4096, 0)
