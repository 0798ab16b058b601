"""A whole job on a recorded node, at level TRACE: content of its log and of all sinks."""

import base64
import json
import logging
import os
import re
import sys

import pytest

from counting import calls
from device_cases import MACHINE
from patience import eventually
from vtorque_core.api import JobAttempt, job_log, kept_records
from vtorque_core.api.log_levels import parse
from vtorque_core.base import names
from vtorque_core.node.start import prologue
from vtorque_core.records import log
from vtorque_testing.faults import run_in_child
from vtorque_testing.recorded import NoBatch, RecordedNode, load

pytestmark = pytest.mark.e2e

SECRET = os.urandom(64)


def recorded(directory, *plugins):
    """Return a node with these plugins; joblog's file is in ``directory``."""
    settings = {"file": f"{directory}/jobs.jsonl"}
    directory.chmod(0o755)
    mine = {"joblog": settings} if "joblog" in plugins else {}
    tables = {"log": {"level": "TRACE"}, "plugin": mine}
    made = RecordedNode.make(
        directory / "node", MACHINE, load({"linux-guest", *plugins}), tables=tables
    )
    made.site.paths.secret.write_bytes(SECRET)
    toml = "".join(f"{key} = {json.dumps(value)}\n" for key, value in settings.items())
    toml = f'[log]\nlevel = "TRACE"\n[plugin.joblog]\n{toml}'
    (made.top / "vtorque.toml").write_text(toml)
    return made


@pytest.fixture
def node(tmp_path):
    return recorded(tmp_path, "joblog")


def start(node, job):
    """Run the prologue in a separate process."""

    def work():
        with node.install_doubles():
            prologue._run(job, node.site, node.plugins, NoBatch(), prologue.StartHook())

    return run_in_child(work, None)


def forbidden(node, job):
    """Return secrets that no sink may get: the site's, the job's, and keys in the job's files."""
    secrets = [SECRET, names.derive(SECRET, "job", job.id, job.attempt)]
    found = {form for s in secrets for form in (s, s.hex().encode(), base64.b64encode(s)[:40])}
    for top in (node.site.paths.run / "jobs", node.site.paths.state / "jobs"):
        for path in top.rglob("*"):
            if path.is_file() and path.stat().st_size < 4 << 20:
                found |= set(re.findall(rb"[A-Za-z0-9+/]{60,}", path.read_bytes()))
    return found


def test_whole_job_is_logged_to_all_sinks(node, tmp_path):
    job = node.job({"vms_per_node": "2", "log": "trace"}, "7.srv")
    assert not start(node, job).error
    secrets = forbidden(node, job)
    assert len(secrets) > 12, "the job has too few secrets: this test shows nothing"
    (kept_at,) = kept_records.find(node.site.paths, "7.srv")
    before = list(job_log.entries(kept_at))
    assert "ended" not in kept_at.facts()
    node.release("7.srv")
    entries = list(job_log.entries(kept_at))
    assert "ended" in kept_at.facts()

    phases = ["plan", "render domain", "pre-boot", "boot", "ready", "post-boot", "run"]
    both = [*phases, "teardown", "release"]
    assert list(dict.fromkeys(e["phase"] for e in before if e["phase"])) == phases
    assert list(dict.fromkeys(e["phase"] for e in entries if e["phase"])) == both
    times = r"times: start [\d.]+ s, run [\d.]+ s, end [\d.]+ s"
    assert re.fullmatch(times, entries[-1]["message"])
    assert {e["node"] for e in entries} == {"n1"} and {e["job"] for e in entries} == {"7.srv"}
    ready = [e for e in entries if e["message"].startswith("ready after")]
    assert sorted(e["guest"] for e in ready) == [0, 1]
    assert any(e["message"].startswith("domain (") and e["guest"] == 1 for e in entries)
    assert [e for e in entries if e["level"] in ("WARN", "ERROR")] == []

    site = tmp_path / "jobs.jsonl"
    eventually(lambda: site.exists() and len(site.read_bytes().splitlines()) >= len(entries))
    told = [json.loads(line) for line in site.read_bytes().splitlines()]
    assert [e["message"] for e in told] == [e["message"] for e in entries]
    kept = (kept_at.directory / "log.jsonl").read_bytes()
    for text in (kept, site.read_bytes()):
        assert not [secret for secret in secrets if secret in text]


def forks(node, job):
    """Return the number of processes that a prologue starts."""
    count = node.top / f"{job.id}.forks"

    def work():
        started = []
        ways = {"os.fork", "os.forkpty", "os.posix_spawn", "subprocess.Popen"}
        sys.addaudithook(lambda event, _: started.append(event) if event in ways else None)
        with node.install_doubles():
            prologue._run(job, node.site, node.plugins, NoBatch(), prologue.StartHook())
        count.write_text(str(len(started)))

    assert not run_in_child(work, None).error
    return int(count.read_text())


def test_start_forks_only_the_follower_of_the_node(tmp_path):
    counts = {}
    for name in ("bare", "joblog"):
        (tmp_path / name).mkdir()
        node = recorded(tmp_path / name, *{"joblog"} & {name})
        counts[name] = [forks(node, node.job({}, f"{n}.srv")) for n in (1, 2)]
        for job in ("1.srv", "2.srv"):
            node.release(job)
    (bare, bare_again), (first, second) = counts["bare"], counts["joblog"]
    assert (first, second) == (bare + 1, bare_again)


def test_log_of_a_refused_job_names_the_reason(node):
    job = node.job({"ram": "9999G"}, "8.srv")
    start(node, job)
    (kept_at,) = kept_records.find(node.site.paths, "8.srv")
    entries = list(job_log.entries(kept_at))
    assert entries[0]["message"].startswith("job 8.srv of ")
    (told,) = [e["message"] for e in entries if e["level"] == "WARN"]
    assert told.startswith("refused: ram=9999G")
    assert kept_at.facts()["outcome"] == "refused"
    node.release("8.srv")
    assert "ended" in kept_at.facts()


def test_log_record_costs_little(node):
    """A job at INFO has about ten records per guest."""
    job = JobAttempt("9.srv", 0, "ada", os.getuid(), "n1")
    one = log.Log(node.site.paths, job, parse("info"))

    def write():
        for number in range(300):
            logging.getLogger("vtorque_core.node.start.boot").info("%d", number)

    with log.open_log(one):
        assert calls(write) < 300 * 600
    assert len(list(job_log.entries(one.place))) == 300
