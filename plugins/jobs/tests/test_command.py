"""``vmgr ps``: output for jobs of the batch system and for their nodes."""

import json
import os
import types

from vtorque_core.api import JobAttempt, Refused, hookimpl, kept_records
from vtorque_core.api.batch_system import JobInfo, JobOnNode
from vtorque_core.live import service
from vtorque_jobs import command
from vtorque_testing import vmgr
from vtorque_testing.planned import load_with_core


def test_job_ids_are_sorted_by_number():
    ids = ["10.s", "9.s", "7[10].s", "7[2].s", "7[].s", "x", "100", "99_2", "99_10"]
    assert sorted(ids, key=command.by_number) == [
        "7[2].s", "7[10].s", "7[].s", "9.s", "10.s", "99_2", "99_10", "100", "x",
    ]  # fmt: skip


def test_ps_shows_ended_jobs_with_exit_codes_only_with_all(monkeypatch, tmp_path):
    config = tmp_path / "vtorque.toml"
    config.write_text(f'[paths]\nstate = "{tmp_path}/state"\nrun = "{tmp_path}/run"\n')
    (tmp_path / "state").mkdir(mode=0o755)
    site = service.paths(config)
    listed = [
        JobInfo("9.srv", "c", "ada", "Q"),
        JobInfo("10.srv", "c", "ada", "R"),
        JobInfo("8.srv", "c", "ada", "C", ended=True, exit_code=3),  # kept only by the server
        JobInfo("1.srv", "c", "ada", "C", ended=True, exit_code=0),
    ]
    submitter = types.SimpleNamespace(jobs=lambda: listed)
    monkeypatch.setattr(command, "_submitter", lambda _: submitter)
    for number, more in enumerate(({"status": "271", "reason": "cancelled"}, {"status": "x"}, {})):
        job = JobAttempt(f"{number}.srv", 0, "ada", os.getuid(), "n")
        kept_records.keep_facts(site, job, started=1.0, ended=2.0 + number, name="a", **more)
    shown = json.loads(vmgr.run(config, "ps", "--all", "--json").stdout)
    assert [(job["id"], job["state"], job["exit_code"]) for job in shown] == [
        ("0.srv", "ended", 271), ("1.srv", "ended", None), ("2.srv", "ended", None),
        ("8.srv", "C", 3), ("9.srv", "Q", None), ("10.srv", "R", None),
    ]  # fmt: skip
    assert shown[0]["reason"] == "exit code 271: cancelled"
    shown = json.loads(vmgr.run(config, "ps", "--json").stdout)
    assert [job["id"] for job in shown] == ["9.srv", "10.srv"]
    done = vmgr.run(config, "ps", "8")
    assert "no job 8 is listed; --all also lists ended jobs" in str(done.exception)
    done = vmgr.run(config, "ps", "--all", "0", "abc")
    assert "no job abc is listed or has records" in str(done.exception)


def test_ps_shows_the_answer_of_each_node(monkeypatch, tmp_path):
    """Each node has one line, with a reason if the node does not answer."""
    found = [
        JobInfo("7.srv", "a", "ada", "R", "n[1-2]", 61.0, nodes=("n1", "n2")),
        JobInfo("8.srv", "b", "ada", "Q", reason="not enough cores"),
        JobInfo("9.srv", "c", "ada", "R", "n3", nodes=("n3",)),
        *(JobInfo(f"70[{task}].srv", "d", "ada", "Q") for task in (1, 2)),
    ]
    submitter = types.SimpleNamespace(jobs=lambda: found)
    monkeypatch.setattr(command, "_submitter", lambda _: submitter)

    @hookimpl
    def vtorque_jobs_on_nodes(jobs):
        assert [job.id for job in jobs] == asked
        yield JobOnNode("7.srv", "n1", "boot", ("vn1",), image="own:\033d.raw,root=script")
        yield JobOnNode("7.srv", "n2", error="no \033way")
        raise RuntimeError("too\033bad")

    module = types.ModuleType("acme")
    module.vtorque_jobs_on_nodes = vtorque_jobs_on_nodes
    plugins = load_with_core("acme", module)
    monkeypatch.setattr(command, "load", lambda *_, **__: (None, plugins))
    config = tmp_path / "vtorque.toml"
    config.write_text("")

    def ps(*argv):
        done = vmgr.run(config, "ps", *argv)
        assert done.exit_code == 0, done
        return done

    asked = ["7.srv", "8.srv"]
    done = ps("--phase", "7", "8.srv")
    assert done.stderr == "vmgr: plugin acme: too\\x1bbad\n"
    rows = [line.split() for line in done.stdout.splitlines()]
    assert rows[0][-4:] == ["REASON", "PHASE", "IMAGE", "GUESTS"]
    assert [row[0] for row in rows[1:]] == ["7.srv", "7.srv", "8.srv"]
    assert rows[1][4:] == ["n1", "00:01:01", "boot", "own:\\x1bd.raw,root=script", "vn1"]
    assert rows[2][4:] == ["n2", "00:01:01", "no", "\\x1bway"]
    asked = ["7.srv"]
    (job,) = json.loads(ps("--phase", "--json", "7").stdout)
    assert job["nodes"] == ["n1", "n2"]
    assert job["on_nodes"][0]["phase"] == "boot" and job["on_nodes"][0]["guests"] == ["vn1"]
    assert "GUESTS" not in ps().stdout
    done = vmgr.run(config, "ps", "7", "9999.vm", "a\033c")
    assert [row.split()[0] for row in done.stdout.splitlines()[1:]] == ["7.srv"]
    assert isinstance(done.exception, Refused) and done.exception.exit_code == 2
    assert str(done.exception) == ("no job 9999.vm, a\\x1bc is listed; --all also lists ended jobs")
    done = vmgr.run(config, "ps", "")
    assert str(done.exception) == "no job '' is listed; --all also lists ended jobs"
    for array in ("70[]", "70[].srv", "70"):
        assert [job["id"] for job in json.loads(ps("--json", array).stdout)] == [
            "70[1].srv",
            "70[2].srv",
        ]
