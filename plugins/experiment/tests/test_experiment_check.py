"""Combinations that vsub would reject are reported before anything is created."""

import json

import pytest
from click.testing import CliRunner

import experiments
from vtorque_experiment import batch, check, definition, matrix, run_session
from vtorque_experiment.book import Book
from vtorque_experiment.command import experiment

GUESTS = """
script = "job.sh"
repetitions = 3
matrix.bare = [true, false]
matrix.vm.%s = [1, 2]
matrix.env.SIZE = [1, 2, 3]
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Return a function that runs ``vmgr experiment run`` on the double."""
    monkeypatch.setattr(batch, "site_batch", lambda config, interval: experiments.double(tmp_path))

    def call(text, *argv, script=experiments.SCRIPT):
        file = experiments.write(tmp_path, text, script)
        argv = ["run", str(file), *argv]
        return CliRunner().invoke(experiment, argv, obj=tmp_path / "site.toml")

    return call


def vsub_calls(top):
    return (top / "batch" / "asked").read_text().splitlines()


def test_vsub_checks_combinations_that_differ_only_in_variables_once(tmp_path, run):
    done = run(GUESTS % "vcpus", "--dry-run")
    assert done.exit_code == 0 and done.stdout.startswith("27 points: 9 combinations, 3 times\n")
    assert done.stdout.endswith("vsub accepts all of them\n")
    assert len(vsub_calls(tmp_path)) == 3  # bare, and two sizes of guests
    assert done.stderr == "vmgr experiment: vsub: warning: no working KVM\n"
    assert not (tmp_path / "e.results").exists()


def test_directives_in_the_script_are_checked(tmp_path):
    script = "#!/bin/sh\n#VSUB -vm ram=1G\n#PBS -q long\nexit 1\n"
    file = experiments.write(tmp_path, 'script = "job.sh"\n', script)
    shows = batch.BatchCommands(("/bin/sh", "-c", "cat >&2; exit 2", "sh"), dict)
    found = definition.read(file)
    said = check.find_refused(file, found, matrix.cells(found), shows, print)
    assert said == {0: "#!/bin/sh | #VSUB -vm ram=1G | #PBS -q long"}


def test_vsub_failure_of_another_kind_refuses_nothing(tmp_path):
    file = experiments.write(tmp_path, 'script = "job.sh"\n')
    fails = batch.BatchCommands(("/bin/sh", "-c", "echo vsub: no disk >&2; exit 1"), dict)
    found, told = definition.read(file), []
    assert check.find_refused(file, found, matrix.cells(found), fails, told.append) == {}
    assert told == ["vsub: no disk"]


def test_building_an_image_is_reported_once_before_it_starts(tmp_path):
    file = experiments.write(tmp_path, 'script = "job.sh"\nmatrix.vm.vcpus = [1, 2]\n')
    released = tmp_path / "told"
    makes = f"""
        echo 'vsub: building the image micro, once' >&2
        while [ ! -e {released} ]; do sleep 0.01; done
        echo '   2.0 s  kernel' >&2
    """
    vsub = batch.BatchCommands(("/bin/sh", "-c", makes, "sh"), dict)
    found, told = definition.read(file), []

    def tell(line):
        told.append(line)
        released.touch()

    assert check.find_refused(file, found, matrix.cells(found), vsub, tell) == {}
    assert told == ["vsub: building the image micro, once"]


def test_try_run_has_fewer_repetitions(tmp_path, run, monkeypatch):
    done = run(GUESTS % "vcpus", "--dry-run", "--repetitions", "1")
    assert done.stdout.startswith("9 points: 9 combinations, once\n")
    monkeypatch.setattr(run_session, "run", lambda *argv, **more: ended(tmp_path))
    monkeypatch.setattr("vtorque_experiment.versions.collect_versions", lambda config: {})
    run(GUESTS % "vcpus", "--repetitions", "1")
    book = Book(tmp_path / "e.results" / "results.sqlite")
    assert len(book.rows()) == 9
    book.close()


@pytest.mark.parametrize("argv", [(), ("--dry-run",)])
def test_misspelled_key_is_refused_before_anything_runs(tmp_path, run, argv):
    done = run(GUESTS % "vcpu", *argv)
    assert done.exit_code == 2
    (line,) = done.stderr.splitlines()
    assert line == (
        "vmgr experiment: vsub would reject guest vcpu=1 SIZE=1 and 5 more: "
        "vsub: there is no -vm key vcpu; did you mean vcpus?"
    )
    assert not (tmp_path / "e.results").exists()
    assert not (tmp_path / "batch" / "submissions").exists()


def test_json_lists_refused_combinations(run):
    found = json.loads(run(GUESTS % "vcpu", "--dry-run", "--json").stdout)
    assert found["points"] == 27 and len(found["combinations"]) == 9
    assert len(found["refused"]) == 6
    assert found["refused"][0]["combination"]["vm.vcpu"] == 1


def test_partly_refused_experiment_runs_and_names_refusals(tmp_path, run, monkeypatch):
    ran = []
    monkeypatch.setattr(
        run_session, "run", lambda *argv, **more: ran.append(argv) or ended(tmp_path)
    )
    monkeypatch.setattr("vtorque_experiment.versions.collect_versions", lambda config: {})
    done = run('script = "job.sh"\nmatrix.vm.vcpu = ["", 1]\n')
    assert done.exit_code == 0 and "would reject vcpu=1: vsub: there is no" in done.stderr
    assert len(ran) == 1


def ended(top, *failed):
    return run_session.RunResult(True, "", top, {"state": "1 point", "failed": failed})


def test_failed_points_are_reported_with_the_next_commands(tmp_path, run, monkeypatch):
    monkeypatch.setattr(run_session, "run", lambda *argv, **more: ended(tmp_path, {"point": 1}))
    monkeypatch.setattr("vtorque_experiment.versions.collect_versions", lambda config: {})
    done = run('script = "job.sh"\n')
    assert done.exit_code == 4
    assert done.stderr.splitlines()[-1] == (
        f"vmgr experiment: 1 failed point: vmgr experiment status {tmp_path} says why; "
        "vmgr experiment resume reads their numbers again, with --failed it reruns them"
    )


def test_only_some_of_very_many_combinations_are_checked(tmp_path, run, monkeypatch):
    monkeypatch.setattr(check, "MOST", 2)
    done = run('script = "job.sh"\nmatrix.vm.vcpus = [1, 2, 3]\n', "--dry-run")
    assert len(vsub_calls(tmp_path)) == 2
    assert "vsub checked 2 of 3 combinations" in done.stderr


def test_remaining_time_is_estimated_from_the_second_point_on():
    pace = run_session.Pace(20)
    assert pace.estimate(10, 100.0) == (0.0, None)  # a resume
    assert pace.estimate(11, 160.0) == (60.0, None)
    assert pace.estimate(12, 200.0) == (100.0, 400.0)
    assert pace.estimate(20, 300.0) == (200.0, 0.0)


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_shows_elapsed_and_remaining_time(monkeypatch, capsys, terminal):
    times = iter([0.0, 1.0, 21.0, 41.0])
    monkeypatch.setattr(run_session.os, "isatty", lambda descriptor: terminal)
    monkeypatch.setenv("COLUMNS", "200")
    now = type("Clock", (), {"monotonic": staticmethod(lambda: next(times))})
    monkeypatch.setattr(run_session, "time", now)
    if terminal:
        next(times)  # when the last line was shown
    with run_session._progress(10) as seen:
        for done in (0, 1, 2):
            seen({"waiting": 10 - done, "submitting": 0, "submitted": 0, "done": done, "failed": 0})
    last = capsys.readouterr().err.rstrip().split("\n")[-1]
    assert "8 waiting, 2 done; 40 s, the rest takes about 2 min 40 s" in last
    assert terminal or last.startswith("vmgr experiment: 2 of 10 points: ")
