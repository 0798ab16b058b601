"""A daemon that is started by a fork is as one that the launcher starts."""

import json
import os
import sys
import time

import pytest

from vtorque_core.api.daemon_process import Process
from vtorque_core.base.errors import HostFault

TELL = """
import glob, json, os, time
found = [n for n in glob.glob("/proc/self/fd/*") if int(n[14:]) > 2 and os.path.exists(n)]
own = [os.path.realpath(n) for n in found]
told = [os.getsid(0) == os.getpid(), os.getcwd(), sorted(os.environ), own]
print(json.dumps(told), flush=True)
time.sleep(99)
"""


class Quick(Process):
    kind = "quick"
    quick = True


def test_its_lock_session_directory_environment_and_descriptors(tmp_path):
    inherited = os.open(tmp_path / "mine", os.O_CREAT | os.O_RDWR)
    os.set_inheritable(inherited, True)
    lock, log = tmp_path / "lock", tmp_path / "log"
    daemon = Quick((sys.executable, "-I", "-c", TELL), str(lock), log=str(log))
    daemon.create()
    try:
        assert not daemon.lost()
        with pytest.raises(HostFault, match="BlockingIOError"):
            daemon.create()
        end = time.monotonic() + 20
        while not (text := log.read_text()) and time.monotonic() < end:
            time.sleep(0.01)
        own, where, environ, files = json.loads(text)
        assert (own, where) == (True, "/")
        assert {"HOME", "LC_ALL", "PATH"} <= set(environ) <= {"HOME", "LC_ALL", "LC_CTYPE", "PATH"}
        assert files == [str(lock)]
        assert os.get_inheritable(inherited)
    finally:
        os.close(inherited)
        daemon.release()
    assert daemon.lost()
    daemon.release()


def test_one_that_cannot_be_executed_says_so(tmp_path):
    daemon = Quick(("/nonexistent/daemon",), str(tmp_path / "lock"))
    with pytest.raises(HostFault, match="/nonexistent/daemon"):
        daemon.create()
    assert daemon.lost()
