"""Checkpoints listed and removed by their users: real files, FIFOs and processes."""

import dataclasses
import json
import os
import threading
import time
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

import running_journal
from finished import finish, saved_guest
from patience import eventually
from vtorque_core.api import HostFault, Refused
from vtorque_survive import checkpoints_command, listing
from vtorque_survive.listing import RemovalWatcher
from vtorque_survive.settings import Settings
from vtorque_survive.stored import Manifest, Store

GUEST = saved_guest("0b1ad9ba")
UID = os.getuid()


@pytest.fixture
def paths(tmp_path):
    return running_journal.paths_below(tmp_path)


@pytest.fixture
def store(tmp_path, paths):
    paths.state.mkdir(parents=True, exist_ok=True)
    top = tmp_path / "checkpoints"
    top.mkdir(mode=0o700)
    return Store(top, UID)


def made(store, name, at=1.0):
    (store.make(name) / "g0.memory").write_bytes(b"x" * 8192)
    job = name.split(".0")[0]
    finish(store, Manifest(name, store.uid, "ada", "n1", at, "micro", "ab", {}, (GUEST,), job))
    return name


@pytest.fixture
def removals(paths, store):
    found = RemovalWatcher(paths, str(store.top))
    yield found
    found.close()


def test_user_lists_only_own_checkpoints(paths, store):
    for at, name in enumerate(("42.srv.0-3", "42.srv.0-5", "41.srv.0")):
        made(store, name, at)
    made(dataclasses.replace(store, uid=UID + 1), "43.srv.0")
    listing.publish(paths, store)
    found = listing.read_list(paths, UID)
    assert [(each.id, each.job, each.node) for each in found] == [
        ("42.srv.0-3", "42.srv", "n1"),
        ("42.srv.0-5", "42.srv", "n1"),
        ("41.srv.0", "41.srv", "n1"),
    ]
    assert all(each.size >= 8192 for each in found)
    assert (listing.place(paths, UID) / listing.FIFO).stat().st_mode & 0o777 == 0o600
    assert listing.read_list(paths, UID + 1) == [], "a user without checkpoints has a list"


def request_answer(paths, removals, name):
    """Send a request as the user, while the watcher runs."""
    removals.poll()
    eventually(lambda: removals.poll() or removals._fifos)
    said = []

    def ask():
        try:
            listing.ask(paths, UID, name, 60.0)
            said.append("")
        except Refused as error:
            said.append(str(error))

    thread = threading.Thread(target=ask)
    thread.start()
    eventually(lambda: removals.poll() or said)
    thread.join()
    eventually(
        lambda: removals.poll() or removals._child is None
    )  # until the checkpoint is removed
    return said[0]


def test_user_removes_only_own_checkpoints(paths, store, removals):
    for name in ("42.srv.0-3", "42.srv.0-5"):
        made(store, name)
    other = dataclasses.replace(store, uid=UID + 1)
    made(other, "43.srv.0")
    assert request_answer(paths, removals, "42.srv.0-3") == ""
    assert [each.id for each in store.manifests()] == ["42.srv.0-5"]
    assert [path.name for path in store.directory.iterdir()] == ["42.srv.0-5"]
    assert "you have no checkpoint 43.srv.0" in request_answer(paths, removals, "43.srv.0")
    assert other.has("43.srv.0")
    assert request_answer(paths, removals, "42.srv.0-5") == ""
    assert not listing.place(paths, UID).exists(), "the list of a user without checkpoints was kept"
    made(store, "44.srv.0")
    listing.publish(paths, store)
    assert request_answer(paths, removals, "44.srv.0") == "", "the FIFO was not made again"


@pytest.mark.parametrize(
    "said",
    [
        b"../43.srv.0\n",
        b"43.srv.0\n",
        b"\xff\n",
        b".42.srv.0.part\n",
        b"x" * 60_000,
        b"\n",
        b"x" * 4087 + b"\n42.srv.0-71\n",
    ],
)
def test_invalid_removal_request_removes_nothing(paths, store, removals, said):
    made(store, "42.srv.0")
    made(dataclasses.replace(store, uid=UID + 1), "43.srv.0")
    made(store, "42.srv.0-7")
    eventually(lambda: removals.poll() or removals._fifos)
    descriptor = os.open(listing.place(paths, UID) / listing.FIFO, os.O_WRONLY | os.O_NONBLOCK)
    os.write(descriptor, said)
    for _ in range(20):
        removals.poll()
    os.close(descriptor)
    eventually(lambda: removals.poll() or removals._child is None)
    assert (
        store.has("42.srv.0")
        and store.has("42.srv.0-7")
        and Store(store.top, UID + 1).has("43.srv.0")
    )


def test_missing_watcher_is_reported(paths, store, monkeypatch):
    made(store, "42.srv.0")
    listing.publish(paths, store)
    monkeypatch.setattr(listing, "_BEGINS", 0.0)
    with pytest.raises(HostFault, match="no vTorque process reads"):
        listing.ask(paths, UID, "42.srv.0", 1.0)


def test_starting_watcher_is_awaited(paths, store, monkeypatch):
    """The watcher starts while the guests boot, and the request may come earlier."""
    made(store, "42.srv.0")
    listing.publish(paths, store)
    fifo = listing.place(paths, UID) / listing.FIFO
    pauses, reads = [], []

    def pause(_):
        pauses.append(1)
        if len(pauses) == 2:
            fifo.unlink(missing_ok=True)
            os.mkfifo(fifo)
            reads.append(os.open(fifo, os.O_RDONLY | os.O_NONBLOCK))
        elif len(pauses) > 2:
            listing.remove(store, "42.srv.0")
            listing.publish(paths, store)

    monkeypatch.setattr(listing, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=pause))
    listing.ask(paths, UID, "42.srv.0", 1.0)
    assert len(pauses) == 3
    assert os.read(reads[0], 99) == b"42.srv.0\n"
    os.close(reads[0])


def test_interrupted_removal_is_hidden_and_finished_later(paths, store):
    made(store, "42.srv.0")
    made(store, "43.srv.0")
    (store.directory / "42.srv.0").rename(store.directory / ".42.srv.0.gone")
    assert [each.id for each in store.manifests()] == ["43.srv.0"]
    assert store.used_bytes() > 8192, "an unfinished removal does not count against the quota"
    (store.directory / ".43.srv.0.gone").mkdir()
    (store.directory / ".43.srv.0.gone/g0.memory").touch()
    listing.remove(store, "43.srv.0")
    assert list(store.directory.iterdir()) == []
    with pytest.raises(Refused, match="no checkpoint 43"):
        listing.remove(store, "43.srv.0")


@pytest.mark.root
def test_checkpoints_command_lists_and_removes(paths, store, monkeypatch):
    made(store, "42.srv.0")
    listing.publish(paths, store)
    monkeypatch.setattr(checkpoints_command.service, "paths", lambda _: paths)
    site = {Settings: Settings(checkpoints=str(store.top))}
    monkeypatch.setattr(checkpoints_command.service, "batch_system", lambda _: (site, None))

    def run(*words):
        found = CliRunner().invoke(checkpoints_command.checkpoints, words, obj=paths.state)
        return found.output, found.exception

    said, _ = run("--json")
    ((name, job, node),) = [(e["id"], e["job"], e["node"]) for e in json.loads(said)]
    assert (name, job, node) == ("42.srv.0", "42.srv", "n1")
    assert "42.srv.0  42.srv" in run()[0]
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    os.utime(listing.place(paths, UID) / listing.LIST, (time.time() - 7200,) * 2)
    assert "old" not in run()[0], "a warning although no other node makes checkpoints"
    site[Settings] = Settings(checkpoints=str(store.top), checkpoints_shared=True)
    assert "this list is 2:00:0" in run()[0]
    listing.publish(paths, store)
    assert "old" not in run()[0]
    assert "is not a checkpoint" in str(run("remove", "../x")[1])
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert "there is no checkpoint 43.srv.0" in str(run("remove", "43.srv.0")[1])
    assert "ada" in run()[0]
    made(dataclasses.replace(store, uid=UID + 1), "42.srv.0")
    assert f"choose one with --uid {UID} or {UID + 1}" in str(run("remove", "42.srv.0")[1])
    assert run("remove", "42.srv.0", "--uid", str(UID + 1))[1] is None
    assert store.has("42.srv.0")
