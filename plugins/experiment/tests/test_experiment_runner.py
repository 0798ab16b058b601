"""The runner against a double of vsub and batch system: killed, refused, full, lost."""

import os
import random
import re
import subprocess
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

import batch_double
import experiments
import sparing
from patience import eventually
from vtorque_core.api import HostFault
from vtorque_experiment import wrapper
from vtorque_experiment.batch import JobQueries, hold_lock, site_batch
from vtorque_experiment.book import DONE, FAILED, Book
from vtorque_experiment.place import validate_place

TWO = """
script = "job.sh"
repetitions = 2
matrix.env.SIZE = [1, 2]
take.rate.pattern = "rate (.*)"
"""


def ran(top):
    return Counter((top / "ran").read_text().split())


def await_no_jobs(top):
    """Wait until no job is left: it would write into a directory that is removed."""
    jobs = top / "batch" / "jobs"
    eventually(lambda: not list(jobs.iterdir()))


def test_each_point_is_run_and_its_results_are_recorded(tmp_path):
    place = experiments.made(tmp_path, TWO)
    assert experiments.run(tmp_path).finished
    found = experiments.rows(tmp_path)
    assert [row.state for row in found] == [DONE] * 4
    book = Book(place.database)
    numbers, cells = book.numbers(), book.cells()
    book.close()
    for row in found:
        values = numbers[row.number]
        assert values["rate"] == cells[row.cell]["env.SIZE"] and values["code"] == 0
        assert values["wall"] >= 0 and values["wait"] >= 0
        assert row.job.endswith(".double") and os.uname().release in row.machine
    assert sorted(ran(tmp_path)) == ["1", "2", "3", "4"]
    await_no_jobs(tmp_path)


@pytest.mark.parametrize(
    ("points", "kills", "mode"),
    sparing.each(3, [(12, 3, "mute"), (20, 4, ""), (200, 50, "mute")]),
)
def test_runner_killed_at_random_runs_each_point_once(tmp_path, points, kills, mode):
    experiments.made(
        tmp_path, f'script = "job.sh"\nrepetitions = {points // 2}\n'
        "matrix.env.SIZE = [1, 2]\nlimits.jobs = 5\n",
    )  # fmt: skip
    (tmp_path / "batch" / "mode").write_text(mode)
    draw = random.Random(points)  # noqa: S311
    for _ in range(kills):
        before = sum(row.state == DONE for row in experiments.rows(tmp_path))
        runner = experiments.process(tmp_path)
        wanted = min(points - 1, before + draw.randrange(max(1, 2 * points // kills)))
        done = lambda w=wanted: sum(r.state == DONE for r in experiments.rows(tmp_path)) >= w  # noqa: E731
        eventually(lambda d=done, r=runner: d() or r.poll() is not None)
        time.sleep(draw.random() / 5)  # at any point of its work
        runner.kill()
        runner.wait()
    assert experiments.run(tmp_path).finished
    assert {row.state for row in experiments.rows(tmp_path)} == {DONE}
    assert ran(tmp_path) == Counter(str(number) for number in range(1, points + 1))
    await_no_jobs(tmp_path)
    assert len((tmp_path / "batch" / "submissions").read_text().splitlines()) == points


def test_rejected_points_fail_with_the_reason_and_the_others_run(tmp_path):
    experiments.made(tmp_path, TWO)
    (tmp_path / "batch" / "mode").write_text("refuse-odd")
    assert experiments.run(tmp_path).finished
    found = {row.number: row for row in experiments.rows(tmp_path)}
    assert [found[n].state for n in (1, 2, 3, 4)] == [FAILED, DONE, FAILED, DONE]
    assert found[1].reason == "rejected: vsub: ram=1T: is more than allowed (limit: 64G)"
    assert sorted(ran(tmp_path)) == ["2", "4"]
    await_no_jobs(tmp_path)


def test_submission_to_a_full_queue_is_retried(tmp_path):
    experiments.made(tmp_path, TWO)
    (tmp_path / "batch" / "mode").write_text("full")
    assert experiments.run(tmp_path).finished
    assert [(row.state, row.tries) for row in experiments.rows(tmp_path)] == [(DONE, 2)] * 4
    assert sorted(ran(tmp_path).values()) == [1, 1, 1, 1]
    await_no_jobs(tmp_path)


def test_lost_job_fails_with_its_last_output(tmp_path):
    experiments.made(tmp_path, TWO)
    (tmp_path / "batch" / "mode").write_text("lost")
    assert experiments.run(tmp_path).finished
    for row in experiments.rows(tmp_path):
        assert row.state == FAILED and "did not start" in row.reason
        assert "the node was lost" in row.reason
    await_no_jobs(tmp_path)


def test_consecutive_failures_stop_the_run(tmp_path):
    text = 'script = "job.sh"\nrepetitions = 9\nlimits.failures = 3\nlimits.jobs = 1\n'
    experiments.made(tmp_path, text, "#!/bin/sh\necho broken >&2\nexit 7\n")
    end = experiments.run(tmp_path)
    assert not end.finished and "limits.failures" in end.why
    found = [row for row in experiments.rows(tmp_path) if row.state == FAILED]
    assert len(found) == 3 and found[0].reason == "exit code 7: broken"
    await_no_jobs(tmp_path)


def test_pattern_that_never_matches_fails_the_point(tmp_path):
    experiments.made(tmp_path, TWO.replace("rate (.*)", "Rate: (.*)"))
    assert experiments.run(tmp_path).finished
    for row in experiments.rows(tmp_path):
        assert row.state == FAILED
        missing = "rate: missing: the pattern 'Rate: (.*)' in stdout; its last line: rate "
        assert re.fullmatch(re.escape(missing) + r"\d+", row.reason)
    await_no_jobs(tmp_path)


def corrected(top, wrong, right):
    """Correct the experiment's file in its results."""
    path = validate_place(top / "results").definition
    path.write_text(path.read_text().replace(wrong, right))


def test_results_are_read_again_without_rerunning_points(tmp_path):
    experiments.made(tmp_path, TWO.replace("rate (.*)", "Rate: (.*)"))
    assert experiments.run(tmp_path).finished
    said: list[str] = []
    assert experiments.run(tmp_path, told=said.append).finished
    assert said == ["read the numbers of 4 failed points again: none are done now"]
    corrected(tmp_path, "Rate: (.*)", "rate (1)")
    experiments.run(tmp_path, told=said.append)
    assert said[1:] == ["read the numbers of 4 failed points again: 2 are done now"]
    corrected(tmp_path, "rate (1)", "rate (.*)")
    experiments.run(tmp_path, told=said.append)
    assert said[2:] == ["read the numbers of 2 failed points again: 2 are done now"]
    found, book = experiments.rows(tmp_path), Book(validate_place(tmp_path / "results").database)
    numbers = book.numbers()
    book.close()
    assert {(row.state, row.reason, row.tries) for row in found} == {(DONE, "", 1)}
    assert sorted(numbers[row.number]["rate"] for row in found) == [1, 1, 2, 2]
    assert all({"wall", "wait", "code"} < numbers[row.number].keys() for row in found)
    assert sorted(ran(tmp_path)) == ["1", "2", "3", "4"]
    await_no_jobs(tmp_path)


def test_points_that_still_fail_do_not_stop_the_run(tmp_path):
    text = 'script = "job.sh"\nrepetitions = 9\nlimits.failures = 3\nlimits.jobs = 1\n'
    experiments.made(tmp_path, text, "#!/bin/sh\n[ $EXPERIMENT_POINT -gt 3 ] || exit 7\n")
    assert not experiments.run(tmp_path).finished
    assert experiments.run(tmp_path).finished
    assert [row.state for row in experiments.rows(tmp_path)] == [FAILED] * 3 + [DONE] * 6
    await_no_jobs(tmp_path)


@pytest.mark.parametrize(
    ("points", "kills"), [(12, 2), pytest.param(200, 50, marks=pytest.mark.full)]
)
def test_runner_killed_while_results_are_read_again_loses_nothing(tmp_path, points, kills):
    text = f'script = "job.sh"\nrepetitions = {points}\ntake.rate.pattern = "Rate (.*)"\n'
    experiments.made(tmp_path, text + "limits = {jobs = 8, failures = 999}\n")
    assert experiments.run(tmp_path).finished
    await_no_jobs(tmp_path)
    corrected(tmp_path, "Rate", "rate")
    draw = random.Random(kills)  # noqa: S311
    for _ in range(kills):
        runner = experiments.process(tmp_path)
        before = sum(row.state == DONE for row in experiments.rows(tmp_path))
        done = lambda b=before: sum(r.state == DONE for r in experiments.rows(tmp_path)) > b  # noqa: E731
        eventually(lambda d=done, r=runner: d() or r.poll() is not None)
        time.sleep(draw.random() / 100)
        runner.kill()
        runner.wait()
    assert experiments.run(tmp_path).finished
    book = Book(validate_place(tmp_path / "results").database)
    assert {row.state for row in book.rows()} == {DONE}
    assert [found.keys() for found in book.numbers().values()] == [
        {"code", "rate", "wait", "wall"}
    ] * points
    book.close()
    assert set(ran(tmp_path).values()) == {1}


def test_failure_reason_is_printed_only_once(tmp_path):
    text = 'script = "job.sh"\nrepetitions = 4\nlimits.jobs = 1\ntake.x.pattern = "x ([0-9])"\n'
    place = experiments.made(tmp_path, text, '#!/bin/sh\nexit "$((EXPERIMENT_POINT == 3))"\n')
    said: list[str] = []
    experiments.run(tmp_path, told=said.append)
    missing = "x: missing: the pattern 'x ([0-9])' in stdout"
    assert said == [
        f"point 1 failed: {missing} ({place.point(1)})",
        f"point 3 failed: exit code 1; {missing} ({place.point(3)})",
    ]
    await_no_jobs(tmp_path)


def test_time_limit_of_zero_submits_nothing(tmp_path):
    experiments.made(tmp_path, TWO)
    end = experiments.run(tmp_path, hours=0.0)
    assert not end.finished and "hours" in end.why
    assert not (tmp_path / "batch" / "submissions").exists()


def test_stopped_runner_submits_nothing(tmp_path):
    experiments.made(tmp_path, TWO)
    stop = threading.Event()
    stop.set()
    assert not experiments.run(tmp_path, stop=stop).finished
    assert not (tmp_path / "batch" / "submissions").exists()


def test_full_disk_loses_no_results(tmp_path, monkeypatch):
    place = experiments.made(tmp_path, TWO)
    book = Book(place.database)
    pages = book._db.execute("PRAGMA page_count").fetchone()[0]
    book._db.execute(f"PRAGMA max_page_count={pages}")  # the error of a full file system: FULL
    with pytest.raises(
        HostFault,
        match="full; no results are lost: free disk space or correct the permissions, then run",
    ):
        for number in range(1, 5):
            book.record_failure(number, "x" * 5000)
    book.close()
    assert experiments.run(tmp_path).finished
    await_no_jobs(tmp_path)


def test_script_claimed_by_another_job_is_not_run(tmp_path):
    point = tmp_path / "p"
    point.mkdir()
    runs = tmp_path / "run.sh"
    runs.write_text(f"#!/bin/sh\necho x >>{tmp_path}/ran\n")
    runs.chmod(0o755)
    job = tmp_path / "job.sh"
    job.write_bytes(wrapper.script(runs.read_bytes(), runs, point, {}))

    def as_job(name):
        environ = {"PATH": "/usr/bin:/bin", "PBS_JOBID": name}
        done = subprocess.run(["sh", job], env=environ, check=False, capture_output=True)
        return done.returncode

    assert [as_job("1.srv"), as_job("2.srv"), as_job("1.srv")] == [0, 1, 0]
    assert (tmp_path / "ran").read_text() == "x\n"


def test_exit_code_of_a_killed_script_is_noted(tmp_path):
    point = tmp_path / "p"
    point.mkdir()
    runs = tmp_path / "run.sh"
    runs.write_text("#!/bin/sh\nexec sleep 600\n")
    runs.chmod(0o755)
    (tmp_path / "job.sh").write_bytes(wrapper.script(runs.read_bytes(), runs, point, {}))
    job = subprocess.Popen(["sh", tmp_path / "job.sh"])
    eventually((point / "begun").exists)
    eventually(lambda: Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text())
    job.terminate()
    assert job.wait() == 143
    assert (point / "ended").read_text().split()[0] == "143"


def test_concurrent_runs_are_refused(tmp_path):
    path, said = tmp_path / "lock", "in use by another vmgr experiment; vmgr"
    with (
        hold_lock(path, wait=False),
        pytest.raises(HostFault, match=said),
        hold_lock(path, wait=False),
    ):
        pass


def test_polling_interval_is_kept_after_a_resume(tmp_path):
    (tmp_path / "jobs").mkdir()
    double = experiments.double(tmp_path, interval=10.0)
    noted: list[float] = []
    assert not JobQueries(double, time.time(), noted.append).is_due
    assert JobQueries(double, time.time() - 11, noted.append).is_due
    assert JobQueries(double, time.time() + 9999, noted.append).wait <= 10  # a clock that was set
    (tmp_path / "batch" / "jobs").mkdir(parents=True)
    asked = JobQueries(double, 0, noted.append)
    assert asked.is_due and asked.ask() == {} and not asked.is_due and len(noted) == 1


def test_unresponsive_batch_system_is_reported_and_polled_again(tmp_path):
    experiments.made(tmp_path, TWO)
    (tmp_path / "batch" / "mode").write_text("full")
    failures = [HostFault("no answer"), HostFault("no answer")]
    good = experiments.double(tmp_path)

    def jobs() -> dict[str, str]:
        if failures:
            raise failures.pop()
        return dict(good.jobs())

    said: list[str] = []
    batch = type(good)(good.vsub, jobs, good.interval)
    assert experiments.run(tmp_path, batch=batch, told=said.append).finished
    assert said == ["the batch system does not answer: no answer"]
    await_no_jobs(tmp_path)


def test_batch_double_assigns_distinct_job_ids(tmp_path):
    assert [batch_double._new(tmp_path) for _ in range(3)] == ["1.double", "2.double", "3.double"]


@pytest.mark.parametrize(
    ("system", "command", "option"),
    [
        ("slurm", "sbatch", "-J"),
        ("slurm", "qsub", "-N"),
        ("torque", "", "-N"),
        ("openpbs", "", "-N"),
        ("local", "", "-N"),
    ],
)
def test_job_name_option_follows_the_submit_command(tmp_path, system, command, option):
    config = tmp_path / "vtorque.toml"
    settings = f'[plugin.slurm]\ncommand = "{command}"\n' if command else ""
    config.write_text(f'[batch]\nsystem = "{system}"\n{settings}')
    assert site_batch(config, 10).naming == option
