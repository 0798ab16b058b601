"""The service of the embedded batch system: its end, its queue, and hostile clients."""

import contextlib
import ctypes
import functools
import json
import operator
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from local_site import HOOK, HOST, SUBMIT, LocalSite, fresh_site
from patience import LONG, eventually
from processes import open_files
from vtorque_core.api import Busy, Paths, UsageError, VtorqueError, take_lock
from vtorque_core.api.batch_system import JobState
from vtorque_core.config.request import Request
from vtorque_local.mom import JobPrograms
from vtorque_local.node import LocalNode
from vtorque_local.service import LocalService, Setup
from vtorque_local.submitter import LocalSubmitter
from vtorque_testing.faults import run_in_child

pytestmark = pytest.mark.e2e


@pytest.fixture
def site():
    with fresh_site() as site:
        yield site


def test_killed_service_loses_running_jobs_and_keeps_queued_ones(site):
    loop = site.script("sleep 300 &\nsetsid sleep 300 &\necho $$ >> pids\nwait\n")
    common = ("-S", "/bin/sh", "-d", str(site.root), "-o", "out", "-j", "oe")
    argv = [sys.executable, "-c", SUBMIT, str(site.paths.run), "-W", "block=true", *common, loop]
    waiting = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    site.wait_for(site.root / "pids", "\n")
    site.submit(*common, loop)
    eventually(lambda: len((site.root / "pids").read_text().split()) == 2)
    site.submit("-d", str(site.root), "-o", "third", site.script("#!/bin/sh\necho third\n", "t"))
    marks = [job["environ"]["PBS_JOBCOOKIE"] for job in spooled(site)[:2]]
    eventually(lambda: [len(marked(mark)) >= 3 for mark in marks] == [True, True])
    site.stop(signal.SIGKILL)
    _, said = waiting.communicate(timeout=LONG)
    assert (waiting.returncode, b"lost" in said) == (252, True)
    node = LocalNode(site.spool)
    assert node.job_states([f"1.{HOST}", "9.x"]) == {
        f"1.{HOST}": JobState.ALIVE,
        "9.x": JobState.GONE,
    }
    site.start()
    assert site.hook("epilogue", f"1.{HOST}")[9] == "-4"
    assert site.hook("epilogue", f"2.{HOST}")[9] == "-4"
    assert (
        "lost: the batch system was restarted"
        in site.wait_for(site.root / "out", "lost").read_text()
    )
    assert site.done("3") == 0
    assert (site.root / "third").read_text() == "third\n"
    assert (site.done("1"), site.done("2")) == (252, 252)
    eventually(lambda: not any(marked(mark) for mark in marks))  # all sessions
    assert node.job_states([f"1.{HOST}"]) == {f"1.{HOST}": JobState.GONE}
    site.submit(site.script("#!/bin/sh\n"))
    assert site.hook("epilogue", f"4.{HOST}"), "job ids start again"


def test_kernel_ends_hook_and_job_with_the_service(site):
    """The service is killed and not started again."""
    (site.root / "prologue").write_text(HOOK.format(dir=site.root, name="prologue"))
    site.submit("-d", str(site.root), site.script("exec sleep 300\n"), blob=Request().encode())
    mark = spooled(site)[0]["environ"]["PBS_JOBCOOKIE"]
    eventually(lambda: marked(mark))
    site.stop(signal.SIGKILL)
    eventually(lambda: not marked(mark))


def marked(cookie: str) -> list[int]:
    """Return the processes that have a job's cookie in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if cookie.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def spooled(site: LocalSite) -> list[dict]:
    files = sorted((site.spool / "jobs").glob("*/job"), key=lambda path: int(path.parent.name))
    return [json.loads(path.read_text()) for path in files]


def test_killed_service_ends_its_prologue_before_the_epilogue(site):
    (site.root / "prologue.sleep").write_text("60")
    site.submit("-e", "err", site.script("#!/bin/sh\ntouch ran\n"))
    site.hook("prologue", f"1.{HOST}")
    site.stop(signal.SIGKILL)
    site.start()
    assert site.hook("epilogue", f"1.{HOST}")[9] == "-4"
    assert not (site.root / "ran").exists()


def test_shutdown_ends_running_jobs_and_keeps_queued_ones(site):
    job = site.script("sleep 60\n")
    for _ in range(3):
        site.submit("-S", "/bin/sh", job)
    site.hook("prologue", f"2.{HOST}")
    site.submitter.shut_down()
    assert site.ended() == 0
    assert [j["state"] for j in spooled(site)] == ["Q"]
    with pytest.raises(VtorqueError, match="vtorque local serve"):
        list(site.submitter.jobs())
    site.start()
    site.hook("prologue", f"3.{HOST}")
    site.submitter.cancel("3")


def test_second_service_is_refused(site):
    run, spool = Path(site.config["run"]), Path(site.config["spool"])
    second = LocalService(Setup(run, spool, JobPrograms((), (), ()), (), lock_wait=0.3))
    before, mask = (run / "local.sock").stat(), os.umask(0o022)
    with pytest.raises(Busy, match="held by another process"):
        second.open()
    os.umask(mask)
    assert (run / "local.sock").stat() == before, "the socket of the running service was changed"


def ask(site: LocalSite, data: bytes) -> bytes:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(LONG)
        sock.connect(str(site.paths.run / "local.sock"))
        try:
            sock.sendall(data)
            return sock.makefile("rb").readline()
        except OSError:
            return b"closed"


def test_hostile_messages_are_refused_and_change_nothing(site):
    good = {
        "op": "submit",
        "argv": ["-N", "x"],
        "script": "",
        "environ": {},
        "cwd": "/",
        "token": "",
    }
    bad = [
        {"token": "vt1:x,nodes=9"},
        {"token": "vt1:" + "A" * 200_000},
        {"token": "x"},
        {"token": None},
        {"argv": ["-l", "mem=1gb,other=vt1:x"]},
        {"argv": ["-N", "a\nb"]},
        {"argv": ["-F", "x" * 20_000]},
        {"argv": ["-I"]},
        {"argv": 1},
        {"environ": []},
        {"script": "%%%"},
    ]
    for change in bad:
        answer = json.loads(ask(site, json.dumps(good | change).encode() + b"\n"))
        assert "error" in answer, change
    for line in (b"[]\n", b"1\n", b"{\n", b"\xff\n", b'{"op":"nope"}\n', b"[" * 100_000 + b"\n"):
        assert b"error" in ask(site, line)
    ask(site, b"x" * (9 << 20))
    assert spooled(site) == [], "a refused message created a job"
    odd = [
        {"environ": {"A=B": "c"}},
        {"environ": {"A": "b\0c"}},
        {"cwd": "/a\0b"},
        {"cwd": "/\ud800"},
        {"argv": ["-d", "/nowhere"]},
        {"environ": {"A": 1}},
    ]
    for number, change in enumerate(odd, 1):
        answer = json.loads(ask(site, json.dumps(good | change).encode() + b"\n"))
        assert answer == {"id": f"{number}.{HOST}"}, (
            "a value that only the user's process uses was refused"
        )
        site.done(str(number))
    assert site.submit("-W", "block=true", site.script("#!/bin/sh\nexit 3\n")) == 3


def test_silent_clients_do_not_block_others(site):
    idle = [socket.socket(socket.AF_UNIX) for _ in range(95)]
    for sock in idle:
        sock.connect(str(site.paths.run / "local.sock"))
        sock.send(b"{")
    assert site.submit("-W", "block=true", site.script("#!/bin/sh\nexit 3\n")) == 3

    def refused():
        idle.append(socket.socket(socket.AF_UNIX))
        idle[-1].connect(str(site.paths.run / "local.sock"))
        try:
            site.submit(site.script("true\n"))
        except UsageError as error:
            return "connections" in str(error)
        return False

    eventually(refused)
    for sock in idle:
        sock.close()


DAEMON = """
import sys
from pathlib import Path
from vtorque_local.command import _detach
from vtorque_local.mom import JobPrograms
from vtorque_local.service import LocalService, Setup
top = Path(sys.argv[1])
service = LocalService(Setup(top / "run", top / "spool", JobPrograms((), (), ()), ["true"]))
service.open()
_detach(top / "log")
service.serve()
"""


def test_lock_of_a_daemon_names_it_until_it_has_ended(tmp_path):
    subprocess.run([sys.executable, "-c", DAEMON, tmp_path], check=True, timeout=180)
    submitter = LocalSubmitter(Paths(run=tmp_path / "run"))
    assert list(submitter.jobs()) == []
    lock = tmp_path / "spool/lock"
    daemon = os.pidfd_open(int(lock.read_text()))
    submitter.shut_down()
    os.close(take_lock(lock, LONG))
    os.close(daemon)
    assert (tmp_path / "log").read_text() == ""


def test_submission_to_an_ending_service_is_an_error(tmp_path):
    paths = Paths(run=tmp_path)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "local.sock"))
        listener.listen()

        def end() -> None:
            connection, _ = listener.accept()
            connection.recv(1)
            connection.close()  # which resets the connection

        thread = threading.Thread(target=end)
        thread.start()
        with pytest.raises(VtorqueError, match="ended before it answered"):
            list(LocalSubmitter(paths).jobs())
        thread.join()


def test_full_spool_ends_the_job_and_not_the_service(site):
    (site.root / "prologue.hold").touch()
    job = site.script("#!/bin/sh\ntouch ran\n")
    site.submit("-d", str(site.root), job)
    site.hook("prologue", f"1.{HOST}")
    shutil.rmtree(site.spool / "jobs")  # no state can be written any more
    (site.root / "prologue.hold").unlink()
    assert site.hook("epilogue", f"1.{HOST}")[9] == "-2"
    assert not (site.root / "ran").exists(), "a job without a saved state was started"


def test_queue_of_an_older_layout_continues_its_numbers(site):
    (site.spool / "jobs" / "7").mkdir()
    assert not (site.spool / "counter").exists()
    assert site.submit("-W", "block=true", "-o", "out", site.script("#!/bin/sh\necho hi\n")) == 0
    assert site.hook("epilogue", f"8.{HOST}")[9] == "0"


def test_signal_just_before_the_wait_for_events_ends_it(tmp_path):
    """No Python code runs between signal and wait, so the handler has not been called yet."""
    programs = JobPrograms(("true",), ("true",), ("true",))
    service = LocalService(Setup(tmp_path / "run", tmp_path / "spool", programs, ("true",)))

    def work():
        service.open()
        epoll = select.epoll()
        epoll.register(service._wake, select.EPOLLIN)
        send = functools.partial(ctypes.CDLL(None)["raise"], signal.SIGTERM.value)
        came = [*map(operator.call, (send, functools.partial(epoll.poll, LONG)))]
        assert came == [0, [(service._wake, select.EPOLLIN)]]

    assert not run_in_child(work).error


def test_descriptors_of_clients_do_not_reach_root_processes(site, tmp_path):
    """The owner of a descriptor determines how long closing the descriptor takes."""
    eventually(lambda: children(site.process.pid))
    roots = [site.process.pid, *children(site.process.pid)]
    assert len(roots) == 2, "not only the service and the process that accepts clients"
    (tmp_path / "file").touch()
    with (tmp_path / "file").open() as file, socket.socket(socket.AF_UNIX) as client:
        client.connect(str(site.paths.run / "local.sock"))
        socket.send_fds(client, [b"{"], [file.fileno()])
        eventually(lambda: children(roots[1]))
        (its,) = children(roots[1])
        eventually(lambda: str(tmp_path / "file") in open_files(its))
        assert not {str(tmp_path / "file")} & (open_files(roots[0]) | open_files(roots[1]))
        client.sendall(b'"op": "list"}\n')
        assert b"jobs" in client.recv(1000)
    eventually(lambda: not children(roots[1]))


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_slow_close_of_a_descriptor_does_not_delay_the_end(site):
    """close(2) of the last descriptor of a socket with SO_LINGER waits for the other side."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        stuck = socket.create_connection(server.getsockname())
        other, _ = server.accept()
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 1000))
        stuck.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                stuck.send(b"x" * 65536)
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(site.paths.run / "local.sock"))
            os.kill(site.process.pid, signal.SIGSTOP)  # else this test may hold the last copy
            socket.send_fds(client, [b"{"], [stuck.fileno()])
            stuck.setblocking(True)
            stuck.close()
            os.kill(site.process.pid, signal.SIGCONT)
            client.sendall(b'"op": "list"}\n')
            assert b"jobs" in client.recv(1000)
            time.sleep(0.3)
        try:
            assert site.stop() == 0  # which waits for LONG at most
        finally:
            other.close()
