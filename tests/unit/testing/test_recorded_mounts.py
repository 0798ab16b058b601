"""The namespaces of a recorded node's processes, for a user without root."""

import ctypes
import os
from pathlib import Path

from vtorque_testing.faults import run_in_child
from vtorque_testing.recorded_mounts import cover, user_namespace

NOBODY = 65534
_PR_SET_DUMPABLE = 4  # prctl(2); a change of the uid clears it


def _become_user() -> None:
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)


def _look_at_another_process() -> None:
    """Start a process like a job's start does, and check it like the job's release does."""
    _become_user()
    user_namespace.cache_clear()
    user_namespace()
    ready, stop = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(stop[1])
        cover({})
        os.write(ready[1], b"x")
        os.read(stop[0], 1)
        os._exit(0)
    os.close(ready[1])
    assert os.read(ready[0], 1) == b"x"

    def look() -> None:
        os.close(stop[1])
        cover({})
        Path(f"/proc/{pid}/fdinfo/0").read_text()

    try:
        run = run_in_child(look)
        assert not run.error, run
    finally:
        os.close(stop[1])
        os.waitpid(pid, 0)


def test_user_without_root_sees_daemons_of_an_earlier_process() -> None:
    run = run_in_child(_look_at_another_process)
    assert not run.error, run
