"""Jobs that match a word, and their kept records on this and other nodes."""

import os
from pathlib import Path

import pytest
from click.testing import CliRunner

from vtorque_core.api import kept_records
from vtorque_core.api.batch_system import JobInfo
from vtorque_core.api.values import hookimpl
from vtorque_core.base.errors import Refused
from vtorque_core.base.names import JobAttempt, Paths
from vtorque_core.config.plugins import Plugins
from vtorque_core.live import kept_jobs
from vtorque_jobs import command as commands


class CopiesPlugin:
    """A plugin that has copies of records."""

    def __init__(self):
        self.places, self.error = [], None

    @hookimpl
    def vtorque_kept_records(self):
        yield from self.places
        if self.error:
            raise self.error


@pytest.fixture
def node(tmp_path, monkeypatch):
    """A node of this user, who is not root; ``there``: jobs that a plugin finds."""
    tmp_path.chmod(0o755)
    for name in ("state", "there", "there2"):
        (tmp_path / name).mkdir()
    there, plugins = CopiesPlugin(), Plugins()
    plugins.register("there", there, "vtorque-there 1.0.0")
    monkeypatch.setattr(Plugins, "load", lambda **_: plugins)
    config = tmp_path / "vtorque.toml"
    config.write_text(f'[paths]\nstate = "{tmp_path}/state"\nrun = "{tmp_path}/run"\n')
    monkeypatch.setattr(os, "geteuid", lambda: 4321)
    monkeypatch.setattr(os, "getuid", lambda: 4321)
    return config, there


def keep(config, job, at="state", attempt=0, uid=4321, node="n1", **facts):
    mine = JobAttempt(job, attempt, "ada", uid, node)
    paths = Paths(Path(config.parent, at))
    kept_records.keep_facts(paths, mine, **facts)
    return kept_records.place(paths, mine)


def found(config, wanted):
    return sorted(job.id for job in kept_jobs.jobs(config, wanted))


@pytest.mark.root
@pytest.mark.parametrize(
    ("wanted", "jobs"),
    [("22", ["22[0].srv", "22[1].srv"]), ("22[]", ["22[0].srv", "22[1].srv"]),
     ("22[].srv", ["22[0].srv", "22[1].srv"]), ("22[1]", ["22[1].srv"]),
     ("22[1].srv", ["22[1].srv"]), ("2", ["2.srv"]), ("2.srv", ["2.srv"]), ("24", ["24"]),
     ("40", ["40", "41"]), ("40_1", ["41"]), ("41", ["41"]), ("40_[]", []), ("2.s", []),
     ("22[].other", []), ("2[]", []), (".*", []), ("", []), ("[", [])],
)  # fmt: skip
def test_word_selects_matching_jobs(node, wanted, jobs):
    config, _ = node
    for job in ("22[0].srv", "22[1].srv", "2.srv", "24"):
        keep(config, job)
    keep(config, "41", known_as="40_1")
    keep(config, "40", known_as="40_2")  # Slurm: the array's number is also an element's
    if jobs:
        assert found(config, wanted) == jobs
    else:
        with pytest.raises(Refused, match=r"this node has no records of a job .* of yours"):
            kept_jobs.jobs(config, wanted)


@pytest.mark.root
def test_last_attempt_has_a_place_for_each_node(node):
    config, there = node
    there.places = [keep(config, "5.srv", "there", node="n1", said="copy"),
                    keep(config, "5.srv", "there2", node="n2")]  # fmt: skip
    old = keep(config, "5.srv")
    os.utime(old.directory, (1, 1))
    for each in there.places:
        os.utime(each.directory, (5, 5))
    (job,) = kept_jobs.jobs(config, "5.srv")
    assert [place.facts()["node"] for place in job.places] == ["n1", "n2"]
    assert job.places[0].directory == old.directory, "a copy precedes the record of this node"
    again = keep(config, "5.srv", attempt=1)
    os.utime(again.directory, (9, 9))
    (job,) = kept_jobs.jobs(config, None)
    assert [place.key for place in job.places] == ["5.srv.1"] and job.changed == 9


@pytest.mark.root
def test_job_with_damaged_facts_is_found_by_its_file_name(node):
    config, _ = node
    (keep(config, "5.srv").directory / "job.json").write_text("{")
    (job,) = kept_jobs.jobs(config, "5.srv")
    assert (job.id, job.places[0].facts()) == ("5.srv", {})


def test_failing_plugin_loses_only_its_own_places(node, capsys):
    config, there = node
    there.places = [keep(config, "5.srv", "there")]
    there.error = RuntimeError("no \x1b")
    assert found(config, "5.srv") == ["5.srv"]
    assert "plugin there, vtorque_kept_records: no \\x1b" in capsys.readouterr().err
    there.places, there.error = ["5.srv"], None
    with pytest.raises(Refused):
        kept_jobs.jobs(config, "5.srv")
    assert "returned str" in capsys.readouterr().err


@pytest.mark.root
def test_users_find_their_own_jobs_and_root_all_jobs_of_the_node(node, monkeypatch):
    config, there = node
    there.places = [keep(config, "7.srv", "there")]
    keep(config, "5.srv", uid=1)
    with pytest.raises(Refused, match="of yours"):
        kept_jobs.jobs(config, "5.srv")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(kept_jobs, "load", lambda *_, **__: (KeptSite(config), None))
    assert found(config, "5.srv") == ["5.srv"]
    with pytest.raises(Refused, match="sudo -u OWNER"):
        kept_jobs.jobs(config, "7.srv")


class KeptSite:
    def __init__(self, config):
        self.paths = Paths(Path(config.parent, "state"))


class Queue:
    """A batch system with two jobs."""

    def jobs(self):
        return [JobInfo("8.srv", "a", "ada", "R"), JobInfo("9.srv", "b", "ada", "Q")]


@pytest.mark.root
def test_ps_lists_ended_jobs_on_request(node, monkeypatch):
    config, there = node
    keep(config, "5.srv", name="crystal", started=100.0, ended=3765.0, status="3")
    there.places = [keep(config, "6.srv", "there", reason="no such image \x1b", ended=9.0)]
    keep(config, "8.srv", started=1.0, ended=2.0)  # its first attempt; it runs again
    keep(config, "10.srv", started=1.0)  # the latest news of this node
    forged = {"started": float("nan"), "ended": 1e400, "name": [], "status": {}, "node": 7}
    there.places.append(keep(config, "11.srv", "there", **forged))
    monkeypatch.setattr(commands, "_submitter", lambda _: Queue())

    def ps(*argv):
        return CliRunner().invoke(commands.ps, argv, obj=config)

    lines = [line.split() for line in ps("--all").output.splitlines()]
    assert [line[0] for line in lines] == ["ID", "5.srv", "6.srv", "8.srv", "9.srv"]
    assert lines[1] == ["5.srv", "crystal", "ada", "ended", "n1", "01:01:05", "exit", "code", "3"]
    assert lines[2][-4:] == ["no", "such", "image", "\\x1b"]
    assert "ended" not in ps().output
    assert '"state": "ended"' in ps("-a", "--json").output
