"""Restore of a job from a checkpoint: owner, required equality, disk."""

import dataclasses
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

import running_journal
from finished import finish, saved_guest
from vtorque_core.api import ConfigError, HostFault, Image, JobAttempt, JobRequest, Refused
from vtorque_core.api.batch_system import BatchJob
from vtorque_core.api.libvirt_domain import CpuModel
from vtorque_core.api.vm_options import DISK, FS_TYPE
from vtorque_survive import node, restore, tools
from vtorque_survive.resume_options import BEGINNING, CHECKPOINT, NEVER, RESUME
from vtorque_survive.settings import Settings
from vtorque_survive.stored import Manifest, Store
from vtorque_testing import planned

IMAGE = Image("micro", "linux", "micro", "x86_64", "ab" * 32)
JOB = BatchJob("9.srv", "ada", "n1", ("n1",), b"")
NAME = "42.srv.0"
OLD = {"g0/disk-data": [7, 64 << 20, 1_000_000_000]}


@pytest.fixture
def paths(tmp_path):
    return running_journal.paths_below(tmp_path)


@pytest.fixture
def saved_checkpoint(tmp_path, paths, monkeypatch):
    """Return a checkpoint of 42.srv in its store, and the store."""
    monkeypatch.setattr(restore.tools, "tools", lambda cpu="": {"QEMU": "10.0.13"})
    monkeypatch.setattr(restore, "_RELEASED", 0.2)
    top = tmp_path / "checkpoints"
    top.mkdir(mode=0o700)
    uuid = "0b1ad9ba-95f3-54cf-8d96-1d6ed3e4ac1f"
    leased = (("address", "10.86.0.16"),)
    guest = saved_guest(uuid, leased)
    found = Manifest(
        NAME,
        os.getuid(),
        "ada",
        "n1",
        1.0,
        "micro",
        "ab" * 32,
        {"QEMU": "10.0.13"},
        (guest,),
        "42.srv",
    )
    store = Store(top, os.getuid())
    part = store.make(NAME)
    (part / "g0.memory").write_bytes(b"LibvirtQemudSave")
    (part / "g0.disk").write_bytes(b"a disk")
    (part / "session").write_bytes(b"a session")
    finish(store, found)
    return store, found


class Configured(dict):
    """A double of the site config."""

    def __init__(self, paths, settings):
        super().__init__({Settings: settings})
        self.paths, self.path = paths, paths.state / "v.toml"


def boot_sources(
    store, paths, name=NAME, job=JOB, image=IMAGE, uid=None, owner="ada", checkpoint=NEVER
):
    site = Configured(paths, Settings(checkpoints=str(store.top)))
    user = SimpleNamespace(uid=os.getuid() if uid is None else uid, name=owner)
    request = JobRequest({RESUME.key: name, CHECKPOINT.key: checkpoint})
    hook = node.vtorque_boot_sources
    return list(hook(job=job, request=request, image=image, user=user, site=site))


def test_restored_guests_keep_name_uuid_address_and_memory(saved_checkpoint, paths):
    (source,) = boot_sources(saved_checkpoint[0], paths)
    guest = source.identity
    assert (guest.name, guest.uuid) == (
        saved_checkpoint[1].guests[0].name,
        saved_checkpoint[1].guests[0].uuid,
    )
    assert guest.leased == (("address", "10.86.0.16"),)
    assert guest.memory.read_bytes() == b"LibvirtQemudSave"
    assert boot_sources(saved_checkpoint[0], paths, name="") == [], (
        "a job without resume= is restored"
    )


@pytest.mark.parametrize("number", [0, 1])
def test_each_node_restores_its_guests_of_a_multi_node_checkpoint(
    saved_checkpoint, paths, number, monkeypatch
):
    store, found = saved_checkpoint
    guests = (dataclasses.replace(found.guests[0], uuid=f"{rank}") for rank in range(4))
    name, node_ = "44.srv.0", f"n{number + 1}"
    store.make(name)
    whole = dataclasses.replace(
        found, id=name, guests=tuple(guests), nodes=2, node=node_, disks=OLD
    )
    finish(store, whole)
    job = BatchJob("9.srv", "ada", node_, ("n1", "n2"), b"")
    with pytest.raises(Refused, match=r"of a job on several nodes.*checkpoints_shared"):
        boot_sources(store, paths, name=name, job=job)
    monkeypatch.setattr(restore.shared_store, "is_shared_by_nodes", lambda _: True)
    monkeypatch.setattr(restore.shared_store, "acquire_mark", lambda *_: None)
    mine = boot_sources(store, paths, name=name, job=job)
    assert [source.saved.uuid for source in mine] == [f"{2 * number}", f"{2 * number + 1}"]
    assert mine[0].gate is mine[1].gate is not None
    here = store.read(name).node_part(number)
    assert here.disks == ({} if number else OLD), "the disk file belongs to the first node's guest"
    with pytest.raises(Refused, match="is of a job on 2 nodes, but this job has 1"):
        boot_sources(store, paths, name=name)


@pytest.mark.parametrize("name", ["43.srv.0", "..", ".42.srv.0.part", "../0/42.srv.0", "a/b"])
def test_missing_or_unfinished_checkpoint_is_refused(saved_checkpoint, paths, name):
    store = saved_checkpoint[0]
    store.make("42.srv.0")  # unfinished
    if "/" in name or name.startswith("."):
        with pytest.raises(ValueError, match="is not a checkpoint"):
            RESUME.parse(name)
        return
    with pytest.raises(Refused, match="you have no checkpoint"):
        boot_sources(store, paths, name=name)


def test_checkpoint_of_another_user_is_refused(saved_checkpoint, paths):
    with pytest.raises(Refused, match="you have no checkpoint"):
        boot_sources(saved_checkpoint[0], paths, uid=os.getuid() + 1)


@pytest.mark.parametrize("part", ["", "{uid}", "{uid}/42.srv.0"])
def test_checkpoint_that_others_could_have_written_is_refused(saved_checkpoint, paths, part):
    """Root passes the contents to libvirt.

    If the site's directory is missing on a node and its parent is world-writable, a user could
    create it.
    """
    store = saved_checkpoint[0]
    place = store.top / part.format(uid=os.getuid())
    place.chmod(0o777)
    with pytest.raises(Refused, match=r"written by others than root: .*can be written by others"):
        boot_sources(store, paths)
    place.chmod(0o700)
    assert boot_sources(store, paths)


def test_link_to_a_directory_that_others_can_write_is_refused(saved_checkpoint, paths, tmp_path):
    store = saved_checkpoint[0]
    target = tmp_path / "target"
    target.mkdir()
    (store.directory / NAME).rename(target / NAME)
    target.chmod(0o777)
    (store.directory / NAME).symlink_to(target / NAME)
    with pytest.raises(Refused, match="written by others than root"):
        boot_sources(store, paths)


def test_checkpoint_is_not_made_in_a_directory_that_others_can_write(tmp_path):
    """In a sticky directory of root such as /tmp, a user's directory may already exist."""
    store = Store(tmp_path, os.getuid())
    store.directory.mkdir(mode=0o777)
    store.directory.chmod(0o777)
    with pytest.raises(ConfigError, match="can be written by others"):
        store.make(NAME)


def test_checkpoint_of_a_deleted_user_with_the_same_uid_is_refused(saved_checkpoint, paths):
    with pytest.raises(Refused, match="is a checkpoint of user ada"):
        boot_sources(saved_checkpoint[0], paths, owner="bea")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"node": "n2"}, "with node n2, but this node has n1"),
        ({"sha256": "cd" * 32}, "with image micro cdcd"),
        ({"tools": {"QEMU": "9.2"}}, "with QEMU 9.2, but this node has 10.0.13"),
        ({"tools": {"QEMU": "10.0.13", "zstd": "1"}}, "with zstd 1, but this node has none"),
    ],
)
def test_checkpoint_that_differs_from_the_node_is_refused(saved_checkpoint, paths, changed, said):
    store, found = saved_checkpoint
    (store.directory / NAME / "manifest.json").write_bytes(
        dataclasses.replace(found, **changed).encode()
    )
    with pytest.raises(Refused, match=said):
        boot_sources(store, paths)


def test_restore_waits_until_the_saved_job_is_released(saved_checkpoint, paths, monkeypatch):
    """The release of the saved job destroys guests by their UUIDs."""
    store, found = saved_checkpoint
    job = running_journal.JournalledJob(paths, "42.srv")
    assert job.uuids != [found.guests[0].uuid]
    same = dataclasses.replace(found.guests[0], uuid=job.uuids[0])
    (store.directory / NAME / "manifest.json").write_bytes(
        dataclasses.replace(found, guests=(same,)).encode()
    )
    with pytest.raises(HostFault, match=r"is in use by job 42.srv") as raised:
        boot_sources(store, paths)
    assert not raised.value.blames_node, "a user's request could drain the node"
    monkeypatch.setattr(restore, "_RELEASED", 60.0)
    threading.Timer(0.2, job.end).start()
    assert len(boot_sources(store, paths)) == 1


def test_disk_is_copied_once_and_released_twice(tmp_path, saved_checkpoint):
    source = saved_checkpoint[0].directory / NAME / "g0.disk"
    disk = restore.RestoredDisk(str(tmp_path / "root.qcow2"), os.getuid(), str(source))
    disk.release()
    disk.create()
    made = Path(disk.path)
    assert made.read_bytes() == b"a disk" and made.stat().st_mode & 0o777 == 0o600
    with pytest.raises(HostFault, match="File exists"):
        disk.create()
    for _ in range(2):
        disk.release()
        assert not made.exists()
    with pytest.raises(HostFault, match="No such file"):
        dataclasses.replace(disk, source="/none").create()


def test_disk_and_session_are_restored_before_the_guest(saved_checkpoint, paths, tmp_path):
    (was,) = boot_sources(saved_checkpoint[0], paths)
    request = JobRequest({FS_TYPE.key: "sharedfs", CHECKPOINT.key: NEVER, RESUME.key: ""})
    places = {"state_dir": tmp_path / "s", "run_dir": tmp_path / "r"}
    guest = planned.guest_plan(source=was, request=request, qemu_uid=os.getuid(), **places)
    acquired = []
    job = SimpleNamespace(
        site=Configured(paths, Settings(checkpoints=str(saved_checkpoint[0].top))),
        user=SimpleNamespace(uid=os.getuid()),
        guests=[guest],
        acquire=lambda resource, guest=None: acquired.append(resource),
    )
    node.vtorque_pre_boot(job=job)
    made = {Path(each.path).name: each for each in acquired if hasattr(each, "path")}
    there, named = (each for each in acquired if Path(getattr(each, "path", "")).name == "left")
    assert there.content == b"a session" and there.reader == os.getuid()
    assert Path(there.path).parent == tmp_path / "s", (
        "the session is not in the state directory (on disk)"
    )
    assert (named.path, named.target) == (str(tmp_path / "r" / "left"), there.path)
    Path(named.path).parent.mkdir()
    for _ in range(2):
        named.create()
        named.release()
        named.release()
        assert not Path(named.path).is_symlink()
    disk = made["root.qcow2"]
    assert Path(disk.path).parent == tmp_path / "s"
    assert Path(disk.source) == was.saved.memory.with_name("g0.disk")


@pytest.mark.parametrize("arrives", [False, True])
def test_watcher_starts_while_guests_boot_or_before_they_arrive(paths, arrives):
    """The process that receives guests may be killed as soon as they have arrived."""
    request = JobRequest({CHECKPOINT.key: NEVER, RESUME.key: ""})
    source = mock.Mock(remote=arrives, identity=None)
    guest = planned.guest_plan(request=request, source=source)
    acquired = []
    job = SimpleNamespace(
        id="9.srv",
        site=Configured(paths, Settings()),
        user=SimpleNamespace(uid=os.getuid()),
        guests=[guest],
        acquire=lambda resource, guest=None: acquired.append(resource.kind),
        warn=None,
    )
    node.vtorque_pre_boot(job=job)
    assert ("survive-watcher" in acquired) == arrives
    node.vtorque_while_booting(job=job)
    assert acquired.count("survive-watcher") == 1


def test_job_that_this_node_cannot_save_is_refused_before_the_boot(paths):
    job = running_journal.JournalledJob(paths, "9.srv")
    whose = JobAttempt("9.srv", 0, "ada", os.getuid(), "n1")
    guest = planned.guest_plan(request=JobRequest({CHECKPOINT.key: 3600}), job=whose)
    job.kept.add_facts(unsaveable=["SharedMemory", "shared directories"])
    starting = SimpleNamespace(site=SimpleNamespace(paths=paths), guests=[guest])
    with pytest.raises(Refused, match="cannot save guests with SharedMemory, shared directories"):
        node.vtorque_pre_boot(job=starting)


def test_processor_of_the_site_is_set_for_jobs_that_may_be_saved(saved_checkpoint, paths):
    site = Configured(paths, Settings(checkpoints="/srv", cpu_model="Westmere"))
    seen = {}
    for value in (NEVER, 3600):
        guest = planned.guest_plan(request=JobRequest({CHECKPOINT.key: value}))
        seen[value] = list(node.vtorque_render_domain(guest=guest, site=site))
    assert seen == {NEVER: [], 3600: [CpuModel("Westmere")]}
    (was,) = boot_sources(saved_checkpoint[0], paths)
    restored = dataclasses.replace(guest, source=was)
    assert list(node.vtorque_render_domain(guest=restored, site=site)) == [], (
        "the CPU model of a restored guest changes"
    )


def test_named_processor_is_compatible_across_nodes(monkeypatch):
    monkeypatch.setattr(tools, "run_tool", lambda *_, **__: "10.0.13")
    named = tools.tools("Westmere")
    assert tools.cpu_model(named) == "Westmere" and named == tools.tools(tools.cpu_model(named))
    assert tools.cpu_model(tools.tools()) == ""
    assert tools.tools()["processor"] != named["processor"]


AGAIN = BatchJob("42.srv", "ada", "n1", ("n1",), b"", attempt=1)


def test_requeued_job_is_restored_from_its_last_checkpoint(saved_checkpoint, paths):
    store, found = saved_checkpoint
    later = dataclasses.replace(found, id="42.srv.1", made=2.0)
    others = dataclasses.replace(found, id="41.srv.0", made=3.0, job="41.srv")
    for each in (later, others):
        store.make(each.id)
        finish(store, each)
    (guest,) = boot_sources(store, paths, name="", job=AGAIN, checkpoint=3600)
    assert guest.saved.memory.parent.name == "42.srv.1"
    first = dataclasses.replace(AGAIN, attempt=0)
    assert boot_sources(store, paths, name="", job=first, checkpoint=3600) == []
    assert boot_sources(store, paths, name="", job=AGAIN) == [], (
        "a job without checkpoint= is restored"
    )
    assert boot_sources(store, paths, name=BEGINNING, job=AGAIN, checkpoint=3600) == []
    (guest,) = boot_sources(store, paths, name="41.srv.0", job=AGAIN, checkpoint=3600)
    assert guest.saved.memory.parent.name == "42.srv.1", (
        "the job's own, newer checkpoint is not used"
    )


def test_held_job_is_restored_even_without_checkpoint_options(saved_checkpoint, paths):
    store, found = saved_checkpoint
    store.hold(found.id)
    (guest,) = boot_sources(store, paths, name="", job=AGAIN)
    assert guest.saved.memory.parent.name == found.id
    assert boot_sources(store, paths, name=BEGINNING, job=AGAIN) == []
    assert boot_sources(store, paths, name="", job=dataclasses.replace(AGAIN, attempt=0)) == []
    later = dataclasses.replace(found, id="42.srv.1")
    store.make(later.id)
    finish(store, later)
    (guest,) = boot_sources(store, paths, name="", job=AGAIN)
    assert guest.saved.memory.parent.name == later.id, "not the last checkpoint is used"


def test_requeued_job_without_a_checkpoint_starts_from_the_beginning(
    saved_checkpoint, paths, caplog
):
    unknown = dataclasses.replace(AGAIN, id="43.srv")
    assert boot_sources(saved_checkpoint[0], paths, name="", job=unknown, checkpoint=3600) == []
    elsewhere = dataclasses.replace(AGAIN, node="n2", nodes=("n2",))
    assert boot_sources(saved_checkpoint[0], paths, name="", job=elsewhere, checkpoint=3600) == []
    said = [record.message for record in caplog.records]
    assert "without a checkpoint" in said[0] and "with node n1" in said[1]


def test_job_starts_from_the_beginning_after_two_failed_restores(
    saved_checkpoint, paths, tmp_path, caplog
):
    store = saved_checkpoint[0]
    site = Configured(paths, Settings(checkpoints=str(store.top)))
    for attempt in (1, 2):
        again = dataclasses.replace(AGAIN, attempt=attempt)
        (was,) = boot_sources(store, paths, name="", job=again, checkpoint=3600)
        request = JobRequest({CHECKPOINT.key: 3600, FS_TYPE.key: "sharedfs"})
        places = {"state_dir": tmp_path / "s", "run_dir": tmp_path / "r"}
        places["job"] = JobAttempt("42.srv", attempt, "ada", os.getuid(), "n1")
        guest = planned.guest_plan(source=was, request=request, qemu_uid=os.getuid(), **places)
        user = SimpleNamespace(uid=os.getuid())
        job = SimpleNamespace(site=site, user=user, guests=[guest], acquire=lambda *_, **__: None)
        restore.acquire_saved(job)
    third = dataclasses.replace(AGAIN, attempt=3)
    assert boot_sources(store, paths, name="", job=third, checkpoint=3600) == []
    assert "has failed 2 times: the job starts from the beginning" in caplog.text
    restore.reset_failures(job)
    assert len(boot_sources(store, paths, name="", job=third, checkpoint=3600)) == 1


@pytest.mark.parametrize(
    ("then", "now", "says"),
    [
        (OLD, OLD, ""),
        (OLD, {"g0/disk-data": [7, 64 << 20, 1_000_000_001]}, "was changed or replaced"),
        (OLD, {"g0/disk-data": [8, 64 << 20, 1_000_000_000]}, "was changed or replaced"),
        (OLD, {}, "was changed or replaced"),
        ({}, OLD, "was made without a disk file"),
    ],
)
def test_user_disk_that_changed_since_the_checkpoint_is_refused(
    saved_checkpoint, tmp_path, monkeypatch, then, now, says
):
    found = dataclasses.replace(saved_checkpoint[1], disks=then)
    found = Manifest.decode(found.encode(), saved_checkpoint[0].directory / NAME)
    monkeypatch.setattr(tools, "disks", lambda run_dirs: list(run_dirs) and now)
    request = JobRequest({DISK.key: "/home/ada/data.raw"})
    job = SimpleNamespace(guests=[planned.guest_plan(request=request)])
    if not says:
        restore._require_disks(job, found)
        return
    with pytest.raises(Refused, match=rf"disk=/home/ada/data.raw: .*{says}.*; leave out resume"):
        restore._require_disks(job, found)


def test_last_checkpoint_is_found_by_attempt_and_number_despite_clocks(saved_checkpoint):
    store, found = saved_checkpoint
    for name, made in (("42.srv.1-9", 9.0), ("42.srv.2-3", 2.0), ("42.srv.2-11", 1.5)):
        store.make(name)
        finish(store, dataclasses.replace(found, id=name, made=made))
    assert store.list_for_job("42.srv")[-1].id == "42.srv.2-11"
    store.make("42.srv.2")
    finish(store, dataclasses.replace(found, id="42.srv.2", made=0.5))
    assert store.list_for_job("42.srv")[-1].id == "42.srv.2", (
        "the checkpoint that ended the attempt is not the last"
    )
    assert store.list_for_job("43.srv") == []


def test_checkpoint_of_an_earlier_job_with_this_id_is_not_used(saved_checkpoint, paths, caplog):
    """A batch system that was set up again, or has reached its last number, counts from 1 again."""
    store, found = saved_checkpoint
    first = JobAttempt("42.srv", 0, "ada", os.getuid(), "n1")
    request = JobRequest({CHECKPOINT.key: 3600})
    site = Configured(paths, Settings(checkpoints=str(store.top)))
    guests = [planned.guest_plan(job=first, request=request)]
    user = SimpleNamespace(uid=os.getuid())
    restore.acquire_saved(SimpleNamespace(site=site, user=user, guests=guests))
    assert boot_sources(store, paths, name="", job=AGAIN, checkpoint=3600) == []
    assert "requeued without a checkpoint" in caplog.text
    mine = dataclasses.replace(found, id="42.srv.0-3", made=2.0)
    store.make(mine.id)
    finish(store, mine)
    (guest,) = boot_sources(store, paths, name="", job=AGAIN, checkpoint=3600)
    assert guest.saved.memory.parent.name == mine.id
    (guest,) = boot_sources(store, paths)
    assert guest.saved.memory.parent.name == NAME, "the user cannot select the checkpoint by name"
