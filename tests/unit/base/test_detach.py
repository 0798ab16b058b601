"""Work that continues after a hook has ended, with a real process."""

import os
import signal
import time
from pathlib import Path

from killed import kill_parent
from patience import eventually
from vtorque_core.base.detach import run_detached


def test_detached_process_closes_the_files_of_the_hook(tmp_path):
    """A daemon that reads a file of the hook's until its end would wait for this process.

    No other file gets the number: code that has kept it writes to it, or closes it.
    """
    theirs, ours = os.pipe()

    def work(begun):
        (tmp_path / "pid").write_text(str(os.getpid()))
        begun()
        time.sleep(600)
        return 0

    assert run_detached(work) == 0
    pid = int((tmp_path / "pid").read_text())
    os.close(ours)
    os.set_blocking(theirs, False)
    try:
        assert os.read(theirs, 1) == b""
        assert Path(f"/proc/{pid}/fd/{ours}").readlink() == Path(os.devnull)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.close(theirs)


def test_detached_returns_exit_code_of_work_that_ends_first():
    assert run_detached(lambda let_return: 75) == 75


def test_detached_returns_0_when_work_releases_the_caller():
    assert run_detached(lambda let_return: let_return() or 75) == 0


def test_work_continues_after_the_hook_is_killed(tmp_path):
    """The batch system decides the further course of the job, so the work must not fail."""

    def work(let_return):
        kill_parent()
        let_return()
        (tmp_path / "continued").touch()
        return 0

    hook = os.fork()
    if not hook:
        os._exit(run_detached(work))
    assert os.waitstatus_to_exitcode(os.waitpid(hook, 0)[1]) == -signal.SIGKILL
    eventually((tmp_path / "continued").exists)
