"""A whole job on a recorded node, at TRACE: what is in its log and in all sinks, what is not."""

import base64
import json
import logging
import os
import re
import shutil
import tempfile
import time
from pathlib import Path

import pytest

from device_cases import MACHINE
from patience import at_best
from vtorque_core import kept, log, log_read, log_sinks, names, prologue
from vtorque_core.log_levels import parse
from vtorque_core.plugins import Plugins
from vtorque_core.testing.faults import in_child
from vtorque_core.testing.recorded import NoBatch, RecordedNode, load

SECRET = os.urandom(64)


@pytest.fixture
def place():
    """Return a directory that any user can write to: not pytest's, which is its user's alone."""
    path = Path(tempfile.mkdtemp(prefix="joblog-"))
    path.chmod(0o1777)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def node(tmp_path, place, monkeypatch):
    settings = {
        "file": f"{tmp_path}/jobs.jsonl",
        "user_file": f"{place}/{{user}}/{{job}}.log",
        "stderr": True,
    }
    tmp_path.chmod(0o755)
    tables = {"log": {"level": "TRACE"}, "plugin": {"joblog": settings}}
    plugins = load({"linux-guest", "joblog"})
    made = RecordedNode.make(tmp_path / "node", MACHINE, plugins, tables=tables)
    made.site.paths.secret.write_bytes(SECRET)
    toml = "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items())
    (made.top / "vtorque.toml").write_text(f"[plugin.joblog]\n{toml}")
    for name, seconds in (("END", 30.0), ("_OWN_END", 20.0)):  # a busy machine loses nothing
        monkeypatch.setattr(log_sinks, name, seconds)
    monkeypatch.setattr(Plugins, "load", lambda **_: plugins)  # the teardown's process asks for it
    return made


def start(node, job):
    """Run the prologue in a process of its own."""

    def work():
        with node.stood_in():
            prologue._run(job, node.site, node.plugins, NoBatch())

    return in_child(work, None)


def forbidden(node, place, job):
    """Return what no sink may have: site secret, job's secret, and all keys in the job's files."""
    secrets = [SECRET, names.derive(SECRET, "job", job.id, job.attempt)]
    found = {form for s in secrets for form in (s, s.hex().encode(), base64.b64encode(s)[:40])}
    for top in (node.site.paths.run / "jobs", node.site.paths.state / "jobs"):
        for path in top.rglob("*"):
            if path.is_file() and path.stat().st_size < 4 << 20:
                found |= set(re.findall(rb"[A-Za-z0-9+/]{60,}", path.read_bytes()))
    return found


def test_a_whole_job(node, place, tmp_path, capfd):
    job = node.job({"vms_per_node": "2", "log": "trace"}, "7.srv")
    assert not start(node, job).error
    secrets = forbidden(node, place, job)
    assert len(secrets) > 12, "the job has no keys to look for"
    (kept_at,) = kept.find(node.site.paths, "7.srv")
    before = list(log_read.entries(kept_at))
    assert not log_read.ended(kept_at)
    node.release("7.srv")
    entries = list(log_read.entries(kept_at))
    assert log_read.ended(kept_at)

    phases = ["plan", "render domain", "pre-boot", "boot", "ready", "post-boot", "run"]
    both = [*phases, "teardown", "release"]
    assert list(dict.fromkeys(e["phase"] for e in before if e["phase"])) == phases
    assert list(dict.fromkeys(e["phase"] for e in entries if e["phase"])) == both
    assert all(f"{phase} 0." in entries[-1]["message"] for phase in both)
    assert {e["node"] for e in entries} == {"n1"} and {e["job"] for e in entries} == {"7.srv"}
    ready = [e for e in entries if e["message"].startswith("ready after")]
    assert sorted(e["guest"] for e in ready) == [0, 1]
    assert any(e["message"].startswith("domain (") and e["guest"] == 1 for e in entries)
    assert [e for e in entries if e["level"] in ("WARN", "ERROR")] == []

    (users,) = place.glob("*/*.log")
    assert users.name == "7.srv.0.log"
    mine = users.read_text().splitlines()
    site = (tmp_path / "jobs.jsonl").read_text().splitlines()
    assert len(mine) == len(site) == len(entries)
    assert [json.loads(line)["message"] for line in site] == [e["message"] for e in entries]
    out, err = capfd.readouterr()
    for text in ((kept_at.directory / "log.jsonl").read_bytes(), users.read_bytes(),
                 (tmp_path / "jobs.jsonl").read_bytes(), out.encode(), err.encode()):  # fmt: skip
        assert not [secret for secret in secrets if secret in text]
    assert err.count("vtorque: 7.srv: ") == len(entries)


def test_a_refused_job_has_a_log_that_says_why(node, place):
    job = node.job({"ram": "9999G"}, "8.srv")
    start(node, job)
    (kept_at,) = kept.find(node.site.paths, "8.srv")
    entries = list(log_read.entries(kept_at))
    assert entries[0]["message"].startswith("job 8.srv of ")
    (told,) = [e["message"] for e in entries if e["level"] == "WARN"]
    assert told.startswith("refused: ram=9999G")
    assert kept_at.facts()["outcome"] == "refused"
    node.release("8.srv")
    assert log_read.ended(kept_at)


def test_a_record_costs_little(node):
    """CPU time, not wall: a job at INFO has some ten records a guest; 300 take half a second."""
    one = log.Log(node.site.paths, "9.srv", 0, os.getuid(), "n1", parse("info"))
    rounds = []

    def write():
        rounds.append(None)
        begun = time.process_time()
        for number in range(300):
            logging.getLogger("vtorque_core.boot").info("%d", number)
        return time.process_time() - begun

    with log.opened(one):
        assert at_best(write, 0.5) < 0.5
    assert len(list(log_read.entries(one.place))) == 300 * len(rounds)
