"""The simulation: figures calculated by hand, and invalid traces."""

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from vtorque_core.api import Refused, UsageError
from vtorque_pool import plot
from vtorque_pool.command import pool
from vtorque_pool.simulate import Sizes, TraceJob, read, run, table

LINE = "{number} {submit} -1 {run} {used} -1 -1 {asked} -1 -1 1 1 1 1 1 1 -1 -1\n"


def trace(path, jobs):
    lines = [
        LINE.format(number=n, submit=job.submit, run=job.run, used=job.processors, asked=-1)
        for n, job in enumerate(jobs, 1)
    ]
    path.write_text("; Version: 2.2\n\n" + "".join(lines))
    return path


def test_job_without_nodes_waits_for_a_boot():
    found = run([TraceJob(0, 3600, 1)], Sizes(4, 0, 600, ready=120))
    assert (found.jobs, found.mean_wait, found.starts) == (1, 120, 1)
    assert found.machine_hours == pytest.approx(3720 / 3600)
    assert found.busy == pytest.approx(3600 / 3720)


def test_permanent_nodes_avoid_waiting_and_cost_the_whole_time():
    found = run([TraceJob(0, 3600, 2), TraceJob(7200, 3600, 1)], Sizes(2, 2, 600))
    assert found.mean_wait == 0
    assert found.machine_hours == pytest.approx(2 * 3)
    assert found.busy == pytest.approx(3 / 6)


def test_idle_node_ends_and_the_next_job_waits_again():
    jobs = [TraceJob(0, 100, 1), TraceJob(10_000, 100, 1)]
    assert run(jobs, Sizes(1, 0, 600, ready=120)).starts == 2
    assert run(jobs, Sizes(1, 0, 20_000, ready=120)).starts == 1


def test_job_larger_than_the_pool_is_ignored_and_counted():
    jobs = [TraceJob(0, 10, 9), TraceJob(1, 10, 1)]
    found = run(jobs, Sizes(2, 0, 600))
    assert (found.jobs, found.too_large) == (1, 1)
    results = [run(jobs, Sizes(most, 0, idle)) for most in (2, 9) for idle in (60, 600)]
    assert list(table(results))[5:] == ["ignored 1 jobs that need more than 2 nodes"]


def test_processors_are_packed_into_nodes():
    assert run([TraceJob(0, 10, 9)], Sizes(3, 0, 600, cpus=4)).starts == 3


@given(
    st.lists(st.builds(TraceJob, st.integers(0, 5000), st.integers(0, 3000), st.integers(1, 5)),
             min_size=1, max_size=12),
    st.integers(1, 6), st.integers(0, 3), st.integers(1, 2000),
)  # fmt: skip
def test_every_fitting_job_runs_within_the_machine_hours(jobs, most, least, idle):
    jobs = sorted(jobs, key=lambda job: job.submit)
    found = run(jobs, Sizes(most, min(least, most), idle))
    assert found.jobs == sum(job.processors <= most for job in jobs)
    work = sum(job.run * job.processors for job in jobs if job.processors <= most) / 3600
    assert found.machine_hours >= work * (1 - 1e-9)
    assert found.busy <= 1 + 1e-9


@pytest.mark.parametrize(
    "text", ["", "; only\n", "1 2 3\n", "a b c d e f g h\n", "1 0 0 -1 1 1 1 1\n"]
)
def test_invalid_trace_is_refused(tmp_path, text):
    path = tmp_path / "x.swf"
    path.write_text(text)
    with pytest.raises(Refused, match=r"format SWF|no job"):
        read(path)


def test_ten_thousand_jobs_on_a_thousand_nodes_are_simulated(tmp_path):
    jobs = [TraceJob(n * 30, 600 + n * 37 % 7200, 1 + n * 13 % 64) for n in range(10_000)]
    path, page = trace(tmp_path / "big.swf", jobs), tmp_path / "page.html"
    words = ["simulate", str(path), "--nodes", "1000", "--idle", "600", "--html", str(page)]
    done = CliRunner().invoke(pool, words, catch_exceptions=False)
    assert done.exit_code == 0
    assert "\n 1000     0     600  10000 " in done.output
    assert "http://www.w3.org/2000/svg" in page.read_text()
    assert "src=" not in page.read_text()


def test_min_nodes_above_nodes_is_a_usage_error(tmp_path):
    words = ["simulate", str(trace(tmp_path / "x.swf", [TraceJob(0, 1, 1)])), "--nodes", "4,8"]
    with pytest.raises(UsageError, match="--min-nodes 9 is more than --nodes 4,8"):
        CliRunner().invoke(
            pool,
            [*words, "--min-nodes", "9", "--html", str(tmp_path / "x")],
            catch_exceptions=False,
        )


def test_names_in_a_trace_are_escaped_in_the_page():
    page = plot.page("<script>", 1, [run([TraceJob(0, 1, 1)], Sizes(1, 0, 60))])
    assert "<script>" not in page
