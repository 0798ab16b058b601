"""The journal: written before anything is acquired, read after any crash."""

import dataclasses
import json
import os
import threading
import time
from pathlib import Path

import pytest

from vtorque_core.api import kept_records
from vtorque_core.api.acquired import Resource, unjournalled
from vtorque_core.api.job_files import File, Tree
from vtorque_core.base.errors import HostFault
from vtorque_core.base.names import JobAttempt
from vtorque_core.records import journal as journal_module
from vtorque_core.records import reading
from vtorque_core.records.journal import Journal
from vtorque_core.records.reading import (
    EmptyJournal,
    JobHeader,
    JournalError,
    OrphanError,
    find,
    read,
    reconstruct,
)
from vtorque_core.records.timeline import spans
from vtorque_core.resources.kinds import core_kind
from vtorque_core.resources.lease import Lease

HEADER = JobHeader(JobAttempt("42.srv", 0, "u", 1000), "local", {"acme": "vtorque-acme 1.0.0"})


@dataclasses.dataclass(frozen=True)
class CardResource(Resource):
    kind = "acme-card"
    card: str
    lanes: tuple[int, ...] = ()
    firmware: bytes = unjournalled(b"")

    def create(self):
        if self.card == "broken":
            raise HostFault("no such card")

    def release(self):
        pass


@dataclasses.dataclass(frozen=True)
class DomainResource(Resource):
    kind = "domain"
    name: str

    def create(self):
        pass


@pytest.fixture
def journal(paths):
    with Journal.start(paths, HEADER) as journal:
        yield journal


def acquire(journal, resource, **more):
    return journal.acquire(resource, plugin="acme", phase="pre_boot", **more)


def test_start_makes_a_private_file_with_the_header(paths, journal):
    path = paths.journal / "42.srv.0.jsonl"
    assert path.stat().st_mode & 0o7777 == 0o600
    assert paths.journal.stat().st_mode & 0o7777 == 0o700
    assert read(path).header == HEADER


def test_attempt_is_started_once(paths, journal):
    with pytest.raises(HostFault, match=r"vtorque reap 42\.srv"):
        Journal.start(paths, HEADER)
    second = dataclasses.replace(HEADER, job=JobAttempt("42.srv", 1, "u", 1000))
    Journal.start(paths, second).close()
    assert [s.header.job.attempt for s in find(paths, "42.srv")] == [0, 1]
    assert find(paths, "43.srv") == []


def test_record_is_on_disk_before_create_runs(journal, monkeypatch):
    synced = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.fstat(fd).st_size), real(fd)))

    class Nosy(CardResource):
        def create(self):
            last = json.loads(journal.path.read_bytes().splitlines()[-1])
            assert (last["op"], last["kind"]) == ("acquire", "acme-card")
            assert synced[-1] == journal.path.stat().st_size

    acquire(journal, Nosy("a"))
    assert len(synced) == 1


def test_failed_create_stays_open(journal):
    with pytest.raises(HostFault, match="no such card"):
        acquire(journal, CardResource("broken"))
    acquire(journal, CardResource("good"))
    found = [(r.args["card"], r.created) for r in read(journal.path).open]
    assert found == [("broken", False), ("good", True)]


def test_unjournalled_fields_are_left_out_and_defaulted(journal):
    acquire(journal, CardResource("a", lanes=(1, 2), firmware=b"secret"))
    assert b"secret" not in journal.path.read_bytes()
    record = read(journal.path).open[0]
    assert reconstruct(record, CardResource) == CardResource("a", lanes=(1, 2))


def test_field_that_is_not_json_raises_and_writes_nothing(journal):
    size = journal.path.stat().st_size
    with pytest.raises(TypeError, match="field card is a PosixPath"):
        acquire(journal, CardResource(Path("/x")))
    assert journal.path.stat().st_size == size


def test_needs_are_the_leases_and_directories_of_the_guest_and_all_for_a_domain(journal, tmp_path):
    shared, first, second = journal.acquire_leases(
        [(Lease("node", "alone"), None), (Lease("core", "1"), 0), (Lease("core", "2"), 1)],
        phase="plan",
    )
    tree = acquire(journal, Tree(str(tmp_path / "g0")), guest=0)
    card = acquire(journal, CardResource("a"), guest=0)
    file = acquire(journal, File(str(tmp_path / "g0" / "f")), guest=0)
    other = acquire(journal, CardResource("b"), guest=1, needs=[card])
    domain = acquire(journal, DomainResource("vt-0"), guest=0)
    needs = {seq: r.needs for seq, r in read(journal.path).records.items()}
    assert needs[tree] == ()
    assert needs[card] == (shared, first, tree)
    assert needs[file] == (tree,)
    assert needs[other] == (shared, second, card)
    assert needs[domain] == (shared, first, tree, card, file)
    holders = [record.seq for record in read(journal.path).open if tree in record.needs]
    assert holders == [card, file, domain]
    assert read(journal.path).guests == ("vt-0",)
    with pytest.raises(ValueError, match="'needs' contains 99"):
        acquire(journal, CardResource("c"), needs=[99])


def test_every_cut_of_the_last_line_is_ignored_and_cut_off(paths, journal):
    acquire(journal, CardResource("a"))
    whole = journal.path.read_bytes()
    acquire(journal, CardResource("b"))
    journal.close()
    full = journal.path.read_bytes().rpartition(b'{"op": "created"')[0]
    for cut in range(len(whole), len(full)):
        journal.path.write_bytes(full[:cut])
        assert [r.args["card"] for r in read(journal.path).open] == ["a"]
        with Journal.open(paths, journal.path) as again:
            assert acquire(again, CardResource("c")) == 2
        assert [r.args["card"] for r in read(journal.path).open] == ["a", "c"]


@pytest.mark.parametrize("torn", [b"\0\0\0\0", b'{"op": "rel\n', b"\xff\n", b"[]\n"])
def test_unreadable_last_line_is_ignored_as_torn(journal, torn):
    acquire(journal, CardResource("a"))
    with journal.path.open("ab") as file:
        file.write(torn)
    assert len(read(journal.path).open) == 1


def good(**more):
    line = {"op": "acquire", "seq": 1, "plugin": "p", "kind": "k", "scope": "job", "guest": None}
    return {**line, "needs": [], "phase": "x", "args": {}, "t": 1.0, **more}


@pytest.mark.parametrize(
    "line",
    [
        b"garbage",
        b"{}",
        b'{"op":"unheard of"}',
        b'{"op":"job"}',
        b'{"op":"released","seq":9}',
        b'{"op":"released","seq":[]}',
        json.dumps(good(seq="1")).encode(),
        json.dumps(good(scope="world")).encode(),
        json.dumps(good(needs=[5])).encode(),
        json.dumps(good(args=[])).encode(),
        json.dumps(good(guest="x")).encode(),
        json.dumps({k: v for k, v in good().items() if k != "kind"}).encode(),
    ],
)
def test_unreadable_line_in_the_middle_is_named(journal, line):
    with journal.path.open("ab") as file:
        file.write(line + b"\n" + b'{"op":"phase","name":"x","guest":null,"t":1}\n')
    with pytest.raises(JournalError, match=r"42\.srv\.0\.jsonl, line 2: cannot be read"):
        read(journal.path)


def test_journal_without_a_first_line_is_empty(journal):
    for content in (b"", b'{"op":"job"'):
        journal.path.write_bytes(content)
        with pytest.raises(EmptyJournal):
            read(journal.path)


@pytest.mark.parametrize("schema", [None, 0, 2, 99, "1"])
def test_unknown_schema_is_rejected_with_the_version_to_install(journal, schema):
    first = json.loads(journal.path.read_bytes())
    journal.path.write_text(json.dumps({**first, "schema": schema, "core": "9.0"}) + "\n")
    with pytest.raises(JournalError, match=r"of vtorque-core 9\.0.*install the version"):
        read(journal.path)


def test_record_of_an_unknown_kind_or_field_is_an_orphan(journal):
    acquire(journal, CardResource("a"))
    record = read(journal.path).open[0]
    with pytest.raises(OrphanError, match="no loaded plugin knows the kind acme-card"):
        reconstruct(record, core_kind(record.kind))
    newer = dataclasses.replace(record, args={**record.args, "voltage": 3})
    with pytest.raises(OrphanError, match="voltage"):
        reconstruct(newer, CardResource)
    older = dataclasses.replace(record, args={"card": "a"})
    assert reconstruct(older, CardResource) == CardResource("a")


def full_disk(monkeypatch, room):
    """Make writes stop after ``room`` bytes, as write(2) does on a full disk."""
    real = os.write
    left = [room]

    def write(descriptor, data):
        if left[0] <= 0:
            raise OSError(28, "No space left on device")
        done = real(descriptor, data[: left[0]])
        left[0] -= done
        return done

    monkeypatch.setattr(journal_module.os, "write", write)


@pytest.mark.parametrize("room", [0, 1, 50])
def test_full_disk_fails_the_acquire_and_leaves_the_journal_readable(journal, monkeypatch, room):
    acquire(journal, CardResource("a"))
    before = journal.path.read_bytes()
    full_disk(monkeypatch, room)
    with pytest.raises(HostFault, match="No space left"):
        acquire(journal, CardResource("b"))
    assert journal.path.read_bytes() == before
    journal.phase("ready")
    journal.released(1)
    assert journal.path.read_bytes() == before


def test_no_release_is_written_after_a_lost_one(journal, monkeypatch):
    """Otherwise a lease shows as free while its user shows as open."""
    acquire(journal, CardResource("a"))
    acquire(journal, CardResource("b"))
    with monkeypatch.context() as patch:
        full_disk(patch, 5)
        journal.released(2)
    journal.released(1)
    assert [r.seq for r in read(journal.path).open] == [1, 2]


def test_records_of_threads_get_distinct_numbers(journal):
    def work(guest):
        for _ in range(20):
            acquire(journal, CardResource(f"g{guest}"), guest=guest)
            journal.phase("step", guest=guest)

    threads = [threading.Thread(target=work, args=(g,)) for g in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    state = read(journal.path)
    assert [r.seq for r in state.open] == list(range(1, 81))
    assert len(state.phases) == 80


def test_timeline_of_running_and_ended_jobs_has_all_phases(paths, journal):
    assert spans(read(journal.path), time.time()) == []
    journal.phase("plan")
    journal.phase("boot")
    journal.phase("ready", guest=0)
    journal.phase("run")
    now = spans(read(journal.path), time.time())
    assert [s["name"] for s in now] == ["plan", "boot", "ready", "run"]
    assert now[0]["seconds"] == pytest.approx(now[1]["start"] - now[0]["start"])
    assert now[1]["seconds"] == pytest.approx(now[3]["start"] - now[1]["start"])
    journal.delete()
    (place,) = kept_records.find(paths, "42.srv")
    ended = place.facts()["phases"]
    assert ended[:-1] == now[:-1]
    assert ended[-1]["seconds"] >= now[-1]["seconds"] > 0


def test_walk_skips_empty_journals_and_raises_for_unreadable_ones(paths, journal):
    empty, broken = (paths.journal / f"{name}.0.jsonl" for name in ("41.srv", "43.srv"))
    empty.touch()
    assert [state.key for state in reading.walk(paths)] == ["42.srv.0"]
    broken.write_text("no journal\nat all\n")
    with pytest.raises(JournalError, match=r"43\.srv"):
        list(reading.walk(paths))
    assert [state.key for state in reading.walk(paths, "42.srv")] == ["42.srv.0"]
    told = []
    walked = reading.walk(paths, troubled=lambda path, error: told.append((path, type(error))))
    assert [state.key for state in walked] == ["42.srv.0"]
    assert told == [(empty, EmptyJournal), (broken, JournalError)]
