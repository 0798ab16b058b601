"""Companion processes of a job script run from its start to its end."""

import os
import sys

from patience import eventually as until
from processes import alive
from vtorque_core.node.shell import around_script


def started(tmp_path, name):
    path = tmp_path / name
    until(lambda: path.exists() and path.read_text().strip())
    return int(path.read_text())


def test_companion_is_terminated_and_then_killed_after_the_script(tmp_path):
    """A companion can clean up; a companion that ignores SIGTERM is killed with its child."""
    tidy = (
        f"trap 'echo tidy > {tmp_path}/tidied; exit' TERM; echo $$ > {tmp_path}/a; sleep 60 & wait"
    )
    stubborn = f"trap '' TERM; sleep 60 & echo $! > {tmp_path}/child; echo $$ > {tmp_path}/b; wait"
    commands = [["/bin/sh", "-c", tidy], ["/bin/sh", "-c", stubborn], ["/no/such"], [None]]
    with around_script.keep_running(commands):
        pids = [started(tmp_path, name) for name in ("a", "b", "child")]
        assert all(map(alive, pids))
        assert {os.getsid(pid) for pid in pids} == set(pids[:2]), "a companion has no session"
    assert (tmp_path / "tidied").read_text() == "tidy\n"
    until(lambda: not any(map(alive, pids)))


def test_companion_has_none_of_the_jobs_streams(tmp_path):
    found = "[os.readlink(f'/proc/self/fd/{n}') for n in range(3)]"
    show = f"import os; open({str(tmp_path / 'new')!r}, 'w').write(' '.join({found}))"
    show += f"; os.rename({str(tmp_path / 'new')!r}, {str(tmp_path / 'fds')!r})"
    with around_script.keep_running([[sys.executable, "-I", "-c", show]]):
        until((tmp_path / "fds").exists)
    assert (tmp_path / "fds").read_text().split() == ["/dev/null"] * 3


def test_companion_environment_has_batch_variables_but_no_ld_library_path(tmp_path, monkeypatch):
    """Root of the guest can write to the directories of the user's LD_LIBRARY_PATH."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setenv("PBS_JOBID", "7.srv")
    show = f"env > {tmp_path}/new; mv {tmp_path}/new {tmp_path}/env"
    with around_script.keep_running([["/bin/sh", "-c", show]]):
        until((tmp_path / "env").exists)
    names = {line.partition("=")[0] for line in (tmp_path / "env").read_text().splitlines()}
    assert "PBS_JOBID" in names and "LD_LIBRARY_PATH" not in names


def test_companion_that_has_already_ended_is_not_an_error(tmp_path):
    done = tmp_path / "done"
    with around_script.keep_running([["/bin/sh", "-c", f"echo $$ > {done}"]]):
        pid = started(tmp_path, "done")
        until(lambda: not alive(pid))
