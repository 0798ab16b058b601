"""Records kept after a job has ended: place, readers, lifetime."""

import json
import os
import subprocess
import time
from pathlib import Path

import pytest

from vtorque_core.api import kept_records
from vtorque_core.base.names import JobAttempt, Paths

ACL = "system.posix_acl_access"


@pytest.fixture
def paths(tmp_path):
    (tmp_path / "journal").mkdir()
    return Paths(state=tmp_path, run=tmp_path / "run")


def test_new_facts_are_merged_with_stored_facts(paths):
    place = kept_records.place(paths, JobAttempt("42.srv", 1, "u", 1234))
    assert place.facts() == {}
    place.add_facts(job="42.srv", started=1.0)
    place.add_facts(ended=2.0)
    assert place.facts() == {"schema": 1, "job": "42.srv", "started": 1.0, "ended": 2.0}
    assert [p.name for p in place.directory.iterdir()] == ["job.json"]


def test_log_is_appended_to(paths):
    place = kept_records.place(paths, JobAttempt("42.srv", 1, "u", 1234))
    for line in (b"a\n", b"b\n"):
        descriptor = place.append("log.jsonl")
        os.write(descriptor, line)
        os.close(descriptor)
    assert place.read("log.jsonl") == b"a\nb\n"
    assert place.read("log.jsonl", limit=1) == b"a"


def test_attempts_of_a_job_are_found(paths):
    for uid, job, attempt in (
        (1, "42.srv", 1),
        (1, "42.srv", 2),
        (1, "42", 1),
        (2, "43[1].srv", 1),
    ):
        kept_records.place(paths, JobAttempt(job, attempt, "u", uid)).add_facts(
            job=job, attempt=attempt
        )
        time.sleep(0.01)
    assert [p.key for p in kept_records.find(paths, "42.srv")] == ["42.srv.1", "42.srv.2"]
    assert [p.facts()["job"] for p in kept_records.find(paths, "43[1].srv")] == ["43[1].srv"]
    assert len(kept_records.find(paths, None)) == 4
    assert kept_records.find(paths, "42.srv", uid=2) == []
    assert kept_records.find(Paths(state=Path("/nonexistent")), None) == []


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff", b"[" * 100000])
def test_damaged_facts_are_read_as_empty(paths, content):
    place = kept_records.place(paths, JobAttempt("42.srv", 1, "u", 1))
    place.write(kept_records.JOB, content)
    assert place.facts() == {}


def test_only_the_owner_can_read_kept_records(paths):
    """The test reads the access lists, because it runs without root and other users."""
    place = kept_records.place(paths, JobAttempt("42.srv", 1, "u", 1234))
    place.add_facts(job="42.srv")
    os.close(place.append("log.jsonl"))
    told = subprocess.run(
        ["getfacl", "-pn", "-c", *(place.directory / n for n in ("", "job.json", "log.jsonl"))],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    blocks = [block.split() for block in told.strip().split("\n\n")]
    rest = ["group::---", "other::---"]
    assert [[w for w in b if not w.startswith("mask")] for b in blocks] == [
        ["user::rwx", "user:1234:r-x", *rest],
        ["user::rw-", "user:1234:r--", *rest],
        ["user::rw-", "user:1234:r--", *rest],
    ]
    assert paths.kept.stat().st_mode & 0o777 == 0o711
    assert ACL in os.listxattr(place.directory.parent)


def test_creator_killed_before_setting_the_acl_does_not_lock_out_the_owner(paths, monkeypatch):
    """The user's directory is made once: without its ACL they could never read any job."""

    def killed(*_):
        raise KeyboardInterrupt

    place = kept_records.place(paths, JobAttempt("42.srv", 1, "u", 1234))
    for _ in range(2):  # the user's directory, then the job's
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(os, "setxattr", killed)
            place.add_facts(job="42.srv")
    place.add_facts(job="42.srv")
    for directory in (place.directory, place.directory.parent):
        assert ACL in os.listxattr(directory)


def test_file_system_without_acls_keeps_records_readable_by_root_only(paths, monkeypatch):
    def refuse(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "setxattr", refuse)
    place = kept_records.place(paths, JobAttempt("42.srv", 1, "u", 1234))
    place.add_facts(job="42.srv")
    assert (place.directory / "job.json").stat().st_mode & 0o777 == 0o600
    assert place.directory.stat().st_mode & 0o777 == 0o700


def test_full_disk_loses_facts_without_an_error(paths):
    paths.kept.write_text("in the way")
    kept_records.place(paths, JobAttempt("42.srv", 1, "u", 1)).add_facts(job="42.srv")
    assert paths.kept.read_text() == "in the way"


def test_links_are_not_followed(paths, tmp_path):
    place = kept_records.place(paths, JobAttempt("42.srv", 1, "u", 1))
    place.add_facts(job="42.srv")
    target = tmp_path / "target"
    target.write_text("safe")
    (place.directory / "log.jsonl").symlink_to(target)
    with pytest.raises(OSError, match="symbolic"):
        place.append("log.jsonl")
    assert target.read_text() == "safe"


def test_sweep_removes_old_records_and_those_above_the_limit(paths):
    now = time.time()
    for number, age in enumerate((0, 1, 5, 40)):
        place = kept_records.place(paths, JobAttempt(f"{number}.srv", 1, "u", 1))
        place.write("series.jsonl", bytes(1 << 20))
        os.utime(place.directory, (now - age * 86400,) * 2)
    (paths.journal / "3.srv.1.jsonl").write_text("")
    kept_records.sweep(paths, days=3, mib=100, now=now)
    left = [p.key for p in kept_records.find(paths, None)]
    assert left == ["3.srv.1", "1.srv.1", "0.srv.1"], (
        "not exactly the old records of ended jobs were removed"
    )
    kept_records.sweep(paths, days=3, mib=1.5, now=now + 60)
    assert [p.key for p in kept_records.find(paths, None)] == left, "swept more than once an hour"
    kept_records.sweep(paths, days=3, mib=1.5, now=now + 3700)
    assert [p.key for p in kept_records.find(paths, None)] == ["3.srv.1", "0.srv.1"]


def test_sweep_of_a_large_user_keeps_records_of_other_users(paths):
    now = time.time()
    kept_records.place(paths, JobAttempt("old.srv", 0, "u", 1)).write("log.jsonl", bytes(1 << 19))
    for number in range(5):
        place = kept_records.place(paths, JobAttempt(f"{number}.srv", 0, "u", 2))
        place.write("series.jsonl", bytes(1 << 20))
        os.utime(place.directory, (now + number,) * 2)
    kept_records.sweep(paths, days=30, mib=3, now=now + 9)
    assert [p.key for p in kept_records.find(paths, None)] == ["old.srv.0", "3.srv.0", "4.srv.0"]


def test_facts_are_json_that_an_untrusted_reader_can_parse(paths):
    place = kept_records.place(paths, JobAttempt("42.srv", 1, "u", 1))
    place.add_facts(job="42.srv", owner="ü\x1b[31m")
    assert json.loads(place.read(kept_records.JOB))["owner"] == "ü\x1b[31m"
