"""Selection of the node and user that run a command; for an admin it runs as the job's owner."""

import json
import os
import pwd
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path

import pytest

from login_homes import python
from patience import eventually
from processes import alive
from vtorque_core.api import (
    BatchSystem,
    JobAttempt,
    Paths,
    Refused,
    UsageError,
    VtorqueError,
    kept_records,
)
from vtorque_core.api.batch_system import JobInfo
from vtorque_core.live import service
from vtorque_login import await_answer, gathered, remote_command, state
from vtorque_login.remote_command import RemoteCommand
from vtorque_login.settings import Settings
from vtorque_login.state import NodeState
from vtorque_testing.harness import PluginSite
from vtorque_testing.submit import run_in_child

CONFIG = Path("/etc/acme.toml")
ME = pwd.getpwuid(os.getuid()).pw_name
HOST = os.uname().nodename


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Return a site whose batch system has the test's jobs, and which records the commands."""
    tmp_path.chmod(0o755)
    (tmp_path / "state").mkdir()
    paths = Paths(tmp_path / "state", tmp_path / "run")

    def step(job_id, node, argv, terminal):
        made.steps.append((job_id, node, argv[argv.index(str(CONFIG)) + 1 :], terminal))
        return python(made.code)

    made = types.SimpleNamespace(
        jobs=[JobInfo("7.srv", "n", ME, "R", nodes=("n1", "n2"))], steps=[], code="", asked=[],
        paths=paths, step=step, error=None,
    )  # fmt: skip

    def jobs():
        if made.error:
            raise made.error
        return made.jobs

    submitter = types.SimpleNamespace(jobs=jobs)
    batch = BatchSystem(
        "acme", lambda _: submitter, lambda _: None, lambda: None, step=lambda _: made.step
    )
    monkeypatch.setattr(service, "paths", lambda _: paths)
    monkeypatch.setattr(
        service, "batch_system", lambda _: (PluginSite(settings=(Settings(),)), batch)
    )
    return made


def make_request(job_id="7.srv", node="", command="console", terminal=False, output=None, **given):
    operands = {name: words for name, words in given.items() if name in ("rank", "command_")}
    options = {name: words for name, words in given.items() if name not in operands}
    return RemoteCommand(command, job_id, node, options, operands, terminal, output)


def keep(site, uid=None, **facts):
    whose = os.getuid() if uid is None else uid
    place = kept_records.place(site.paths, JobAttempt("7.srv", 0, ME, whose, HOST))
    place.add_facts(node="n1", **facts)


def test_batch_system_runs_the_command_on_the_first_node(site):
    site.code = "raise SystemExit(5)"
    words = {"level": ["--level=info"], "follow": ["--follow"]}
    assert remote_command.run(make_request(command="logs", **words), CONFIG) == 5
    line = ["logs", "--here", "--level=info", "--follow", "--", "7.srv"]
    assert site.steps == [("7.srv", "n1", line, False)]


@pytest.mark.parametrize(("reads", "left"), [(False, b"8\n9\n"), (True, b"")])
def test_command_that_reads_no_input_leaves_standard_input_unread(site, tmp_path, reads, left):
    """``while read id; do vmgr logs $id; done`` stopped after one job: srun reads all input."""
    site.code = "import sys; sys.stdin.read()"
    site.jobs = [replace(site.jobs[0], nodes=("n1",))]  # users ask all nodes, without input
    given = tmp_path / "ids"
    given.write_bytes(b"8\n9\n")
    with given.open("rb", buffering=0) as ids:

        def run():
            os.dup2(ids.fileno(), 0)
            return remote_command.run(replace(make_request(command="logs"), reads=reads), CONFIG)

        assert run_in_child(run, b"", {"PATH": "/usr/bin:/bin"}, tmp_path).code == 0
        assert ids.read() == left


def test_job_number_is_enough_and_operands_follow_the_job(site):
    remote_command.run(
        make_request("7", command="ssh", terminal=True, rank=["0"], command_=["ls", "-l"]), CONFIG
    )
    line = ["ssh", "--here", "--", "7.srv", "0", "ls", "-l"]
    assert site.steps == [("7.srv", "n1", line, True)]


@pytest.mark.parametrize(
    ("facts", "node", "here"),
    [({}, "", True), ({}, "n1", True), ({}, "n2", False), ({"ended": 1.0}, "", False)],
)
def test_records_of_a_running_job_on_this_node_are_used(site, facts, node, here):
    keep(site, **facts)
    assert (remote_command.run(make_request(node=node), CONFIG) is None) == here
    assert bool(site.steps) != here


def test_unknown_job_is_passed_to_the_command(site, capsys):
    site.jobs = []
    assert remote_command.run(make_request(), CONFIG) is None
    site.error = VtorqueError("no server")
    assert remote_command.run(make_request(), CONFIG) is None
    assert capsys.readouterr().err == "vmgr: no server\n"
    keep(site, ended=1.0)
    assert remote_command.run(make_request(), CONFIG) is None
    assert capsys.readouterr().err == "", "an error although there are kept records"


def test_records_of_another_node_are_not_looked_for_locally(site):
    """If the batch system does not report the place, this node has another part of the job."""
    keep(site)
    site.error = VtorqueError("no server")
    with pytest.raises(VtorqueError, match="no server"):
        remote_command.run(make_request(node="n2"), CONFIG)
    assert remote_command.run(make_request(node="n1"), CONFIG) is None


def test_job_on_this_host_runs_locally(site):
    site.jobs = [JobInfo("7.srv", "n", ME, "R", nodes=(HOST.partition(".")[0],))]
    assert remote_command.run(make_request(), CONFIG) is None


def test_reason_of_a_pending_job_is_reported(site):
    site.jobs = [JobInfo("7.srv", "n", ME, "Q", reason="no \x1b room")]
    with pytest.raises(Refused, match=r"its state is Q, reason: no \\x1b room"):
        remote_command.run(make_request(), CONFIG)


@pytest.mark.parametrize("state", ["C", "E", "CG"])
def test_ended_job_is_passed_to_the_command(site, state):
    site.jobs = [JobInfo("7.srv", "n", ME, state, node="n1")]
    assert remote_command.run(make_request(), CONFIG) is None


def test_node_outside_the_job_is_refused_with_the_nodes(site):
    with pytest.raises(UsageError, match=r"job 7\.srv runs on n1, n2"):
        remote_command.run(make_request(node="n3"), CONFIG)


def test_rank_is_looked_up_on_the_nodes_of_the_job(site, monkeypatch):
    there = {"n1": NodeState("run", ((0, "v0"),)), "n2": NodeState("run", ((1, "v1"),))}
    monkeypatch.setattr(state, "query_node", lambda _job, node, *_: there[node])
    remote_command.run(make_request(command="ssh", rank=["1"]), CONFIG)
    assert [step[1] for step in site.steps] == ["n2"]
    with pytest.raises(Refused, match="no guest 9"):
        remote_command.run(make_request(command="ssh", rank=["9"]), CONFIG)


def test_migrated_guest_is_reached_from_the_first_node(site, monkeypatch):
    moved = NodeState("run", ((1, "v1"),))
    there = {
        "n1": NodeState("run", ((0, "v0"),), (("n7", moved),)),
        "n2": NodeState("run", ((1, "v1"),)),
    }
    monkeypatch.setattr(state, "query_node", lambda _job, node, *_: there[node])
    remote_command.run(make_request(command="ssh", rank=["1"]), CONFIG)
    assert [step[1] for step in site.steps] == ["n1"]


@pytest.mark.parametrize(("node", "first"), [("", True), ("n1", True), ("n2", False)])
def test_job_is_contacted_without_steps_of_the_batch_system(site, monkeypatch, node, first):
    site.step = None
    found = []

    def ask(words, job_id, where, _site, *, on_first, terminal):
        found.append((words, job_id, where, on_first, terminal))
        return 4

    monkeypatch.setattr(await_answer, "ask", ask)
    assert remote_command.run(make_request(node=node), CONFIG) == 4
    assert found == [(["console", "--", "7.srv"], "7.srv", node or "n1", first, False)]


def test_output_is_written_to_the_file(site, tmp_path, monkeypatch):
    site.code = "print('<html>')"
    site.jobs = [JobInfo("7.srv", "n", ME, "R", nodes=("n1",))]
    saved = os.dup(1)
    page = tmp_path / "page.html"
    try:
        remote_command.run(make_request(command="report", output=page, html=["--html=-"]), CONFIG)
    finally:
        os.dup2(saved, 1)
        os.close(saved)
    assert page.read_text() == "<html>\n"
    monkeypatch.chdir(tmp_path)
    remote_command.run(make_request(command="report", output=Path("-"), html=["--html=-"]), CONFIG)
    assert not Path("-").exists(), "- was used as a file name"
    with pytest.raises(UsageError, match="No such file"):
        remote_command.run(make_request(command="report", output=tmp_path / "a/b"), CONFIG)


@pytest.mark.parametrize(
    ("wanted", "nodes"),
    [
        ("7.srv", ["7.srv n1", "7.srv n2"]),
        ("8", ["8 n1", "9 n1"]),
        ("8[]", ["8 n1", "9 n1"]),
        ("10[].srv", ["10[3].srv n2"]),
    ],
)
def test_records_of_all_nodes_are_fetched_for_commands_that_read_them(
    site, monkeypatch, wanted, nodes
):
    """The job has several nodes, or is an array whose tasks may have names chosen by users."""
    site.jobs += [
        JobInfo("8", "n", ME, "R", nodes=("n1",), known_as="8_2"),
        JobInfo("9", "n", ME, "R", nodes=("n1", HOST), known_as="8_1"),
        JobInfo("8_3", "n", ME, "PD"),
        JobInfo("10[].srv", "n", ME, "B"),
        JobInfo("10[3].srv", "n", ME, "R", nodes=("n2",)),
    ]
    brought = []
    monkeypatch.setattr(os, "geteuid", lambda: 1)  # root does not read fetched records
    monkeypatch.setattr(gathered, "fetch_records", lambda pairs, *_: brought.extend(pairs))
    assert remote_command.run(make_request(wanted, command="report"), CONFIG) is None
    assert [" ".join(pair) for pair in brought] == nodes
    assert site.steps == [], "the command ran on another host"


@pytest.mark.parametrize(("wanted", "job"), [("8_1", "9"), ("8", "8"), ("9", "9")])
def test_array_task_is_found_by_job_id_and_array_index(site, wanted, job):
    site.jobs = [
        JobInfo("9", "n", ME, "R", nodes=("n1",), known_as="8_1"),
        JobInfo("8", "n", ME, "R", nodes=("n1",), known_as="8_2"),
    ]
    remote_command.run(make_request(wanted), CONFIG)
    assert [step[0] for step in site.steps] == [job]


@pytest.fixture
def runuser(site, monkeypatch, tmp_path):
    """Return a function that puts a script in place of runuser."""
    site.jobs = [JobInfo("7.srv", "n", "nobody", "R", nodes=("n1",))]
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    path = tmp_path / "runuser"
    monkeypatch.setattr(remote_command, "RUNUSER", str(path))

    def runs(script):
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    return runs


@pytest.mark.parametrize("terminal", [True, False])
def test_command_of_an_admin_runs_as_the_owner_without_a_terminal(
    site, runuser, monkeypatch, tmp_path, terminal
):
    """The command gets no open file of root, and root's terminal no control sequences."""
    runuser(
        f'echo "$@" > {tmp_path}/called\nenv > {tmp_path}/env\n'
        f"exec 3>&1 4>&2; readlink /proc/self/fd/3 /proc/self/fd/4 > {tmp_path}/open\n"
        "tty <&1 >&2; printf 'a\\033[2Jb\\n'; exit 6"
    )
    monkeypatch.setenv("LD_PRELOAD_OF_ROOT", "x")
    shown = []
    with (tmp_path / "roots").open("w") as roots:
        out = types.SimpleNamespace(
            isatty=lambda: terminal, write=shown.append, flush=lambda: None, fileno=roots.fileno
        )
        monkeypatch.setattr(sys, "stdout", out)
        monkeypatch.setattr(sys, "stderr", out)
        assert remote_command.run(make_request(node="n1", level=["--level=info"]), CONFIG) == 6
    assert sorted(shown) == ["a\\x1b[2Jb\n", "not a tty\n"]
    assert (tmp_path / "open").read_text().count("pipe:") == 2
    called = (tmp_path / "called").read_text().split()
    assert called[:3] == ["-u", "nobody", "--"]
    assert called[-5:] == ["console", "--node=n1", "--level=info", "--", "7.srv"]
    assert "LD_PRELOAD_OF_ROOT" not in (tmp_path / "env").read_text()
    assert json.dumps(site.steps) == "[]"


def test_ended_command_of_an_admin_leaves_no_root_process(tmp_path):
    """The owner can stop their process, and runuser stops with it."""
    told = tmp_path / "pid"
    script = f"echo $$ >{told}.new; mv {told}.new {told}; kill -STOP $$"
    words = ["/bin/sh", "-c", script], {"PATH": "/usr/bin:/bin"}
    code = "from vtorque_login.remote_command import _run_sanitized\n"
    code += f"_run_sanitized(*{words!r}, print)"
    with subprocess.Popen(python(code)) as asking:
        eventually(told.exists)
        asking.kill()
    eventually(lambda: not alive(told.read_text()))


def test_file_of_an_admin_gets_unchanged_bytes(runuser, tmp_path):
    page, opened = tmp_path / "page.html", tmp_path / "open"
    runuser(f"exec 3>&1; readlink /proc/self/fd/3 > {opened}; printf 'a\\033\\377\\nb'")
    saved = os.dup(1)
    try:
        remote_command.run(make_request(command="report", output=page), CONFIG)
    finally:
        os.dup2(saved, 1)
        os.close(saved)
    assert page.read_bytes() == b"a\x1b\xff\nb"
    assert opened.read_text().startswith("pipe:")


@pytest.mark.root
@pytest.mark.parametrize(
    ("command", "uid", "owners"),
    [("ssh", 65534, True), ("ssh", 0, False), ("console", 65534, False)],
)
def test_admin_on_the_node_uses_the_key_of_the_owner(site, runuser, tmp_path, command, uid, owners):
    runuser(f'echo "$@" > {tmp_path}/called')
    keep(site, uid, owner="nobody")
    assert remote_command.run(make_request(command=command), CONFIG) == (0 if owners else None)
    assert (tmp_path / "called").exists() == owners


def test_closed_output_of_an_admin_ends_the_command(runuser, monkeypatch):
    runuser("yes")

    def gone(_):
        raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", types.SimpleNamespace(write=gone))
    with pytest.raises(BrokenPipeError):
        remote_command.run(make_request(), CONFIG)
