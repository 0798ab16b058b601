"""``vmgr logs``: output of a job's log and of the consoles of its guests."""

import json
import logging
import os
import subprocess
import sys
import time
import types

import pytest

from acme_card import in_other_process
from vtorque_core.api import JobAttempt, Paths, kept_records
from vtorque_core.api.log_levels import parse
from vtorque_core.live import jobs, service
from vtorque_core.records import log
from vtorque_testing import vmgr

boot = logging.getLogger("vtorque_core.node.start.boot")


@pytest.fixture
def paths(tmp_path):
    tmp_path.chmod(0o755)
    (tmp_path / "state").mkdir()
    return Paths(tmp_path / "state", tmp_path / "run")


def a_log(paths, level="INFO"):
    return log.Log(paths, JobAttempt("42.srv", 0, "ada", os.getuid(), "n1"), parse(level))


def place(paths):
    return kept_records.place(paths, JobAttempt("42.srv", 0, "u", os.getuid()))


def cli(paths, tmp_path, *argv):
    config = tmp_path / "vtorque.toml"
    config.write_text(f'[paths]\nstate = "{paths.state}"\nrun = "{paths.run}"\n')
    return vmgr.run(config, "logs", *argv)


def test_logs_are_shown_and_filtered(paths, tmp_path):
    with log.open_log(a_log(paths, "debug")):
        log.enter("boot")
        boot.info("of guest 1", extra={"guest": 1})
        log.enter("run")
        boot.debug("little")
        boot.error("broken \x1b[31m", extra={"detail": ["said \x1b"]})
    shown = cli(paths, tmp_path, "42.srv")
    assert shown.exit_code == 0 and len(shown.output.splitlines()) == 4
    assert shown.output.splitlines()[-1] == "    | said \\x1b"
    assert cli(paths, tmp_path, "--phase", "boot", "42.srv").output.count("\n") == 1
    assert "of guest 1" in cli(paths, tmp_path, "--guest", "1", "42.srv").output
    assert cli(paths, tmp_path, "--level", "info", "42.srv").output.count("\n") == 3
    (one,) = cli(paths, tmp_path, "--level", "error", "--json", "42.srv").output.splitlines()
    assert json.loads(one)["message"] == "broken \\x1b[31m"
    place(paths).write("console-g0.log", b"panic\x1b[2J\n")
    assert cli(paths, tmp_path, "--console", "42.srv").output == "panic\\x1b[2J\n"
    refused = cli(paths, tmp_path, "43.srv").exception
    assert "this node has no records of a job 43.srv" in str(refused)
    assert "unknown; known: trace" in str(
        cli(paths, tmp_path, "--level", "loud", "42.srv").exception
    )


def test_log_is_followed_to_its_end(paths, tmp_path):
    def job():
        with log.open_log(a_log(paths)):
            for number in range(3):
                boot.info("%d", number)
                time.sleep(0.1)
        place(paths).add_facts(ended=time.time())

    with log.open_log(a_log(paths)):
        boot.info("first")
    pid = in_other_process(job)
    shown = cli(paths, tmp_path, "-f", "42.srv")
    os.waitpid(pid, 0)
    assert [line[-1] for line in shown.output.splitlines()] == ["t", "0", "1", "2"]


@pytest.mark.root
def test_console_of_a_running_guest_is_shown(paths, tmp_path, monkeypatch):
    """The console is shown to root, and to an owner who may read it."""
    job = JobAttempt("42.srv", 0, "ada", os.getuid() + 1)
    guests = [types.SimpleNamespace(index=0)]
    kept = kept_records.place(paths, job)
    kept.add_facts(job="42.srv")
    running = types.SimpleNamespace(job=job, guests=guests, kept=kept)
    monkeypatch.setattr(jobs.RunningJobs, "jobs", lambda _: [running])
    monkeypatch.setattr(service, "paths", lambda _: paths)  # root would trust only root's
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    place = paths.job_state(job.key) / "g0"
    place.mkdir(parents=True)
    (place / "console.log").write_bytes(b"login:\x1b[2J\r\n")
    assert cli(paths, tmp_path, "--console", "42.srv").output == "login:\\x1b[2J\n"
    other = cli(paths, tmp_path, "--console", "--guest", "1", "42.srv").exception
    assert "has no running guest 1 on this node" in str(other)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "no running guest 0" in str(cli(paths, tmp_path, "--console", "42.srv").exception)
    mine = kept_records.place(paths, JobAttempt("42.srv", 0, "u", os.getuid()))
    mine.add_facts(job="42.srv")
    assert cli(paths, tmp_path, "--console", "42.srv").output == "login:\\x1b[2J\n"
    monkeypatch.setattr(os, "access", lambda path, *_: not str(path).endswith("console.log"))
    assert "you cannot read the console" in str(
        cli(paths, tmp_path, "--console", "42.srv").exception
    )
    mine.add_facts(ended=1.0)
    assert "no running guest 0" in str(cli(paths, tmp_path, "--console", "42.srv").exception)


def test_followed_console_ends_with_the_job_without_warnings(tmp_path):
    """tail -F warned twice: the owner may enter the guest's directory, and not list it."""
    tmp_path.chmod(0o755)
    place = tmp_path / "g0"
    place.mkdir()
    place.chmod(0o311)
    log = place / "console.log"
    log.write_bytes(b"one\n" + b"x" * (1 << 20) + b"\ntwo")
    code = (
        "from pathlib import Path\n"
        "from vtorque_joblog import command\n"
        f"found = command._lines(command._console(Path({str(log)!r}), True))\n"
        "for line in found:\n"
        "    print(min(len(line), 4096), line[:9].decode(), flush=True)\n"
    )
    no_rights = ["setpriv", "--inh-caps=-all", "--bounding-set=-all", "--"]
    argv = [*(no_rights if os.getuid() == 0 else []), sys.executable, "-c", code]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdout=pipe, stderr=pipe, text=True) as follower:
        assert follower.stdout
        shown = [follower.stdout.readline() for _ in range(2)]
        with log.open("r+b") as file:  # as the recorder: drop the beginning, then append
            kept = file.read()[1 << 20 :]
            file.seek(0)
            file.write(kept + b"three\n")
            file.truncate()
        shown.append(follower.stdout.readline())
        log.unlink()
        place.rmdir()
        out, err = follower.communicate(timeout=60)
    assert (out, [line.rstrip() for line in shown]) == (
        "",
        ["3 one", "4096 xxxxxxxxx", "8 twothree"],
    )
    assert (out, err, follower.returncode) == ("", "", 0)
