"""What one user does to the embedded batch system holds up nobody else: real FUSE, real floods."""

import base64
import contextlib
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import fuse_server
from local_site import HOST, fresh_site
from patience import LONG, eventually

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(os.getuid() != 0, reason="becomes another user, mounts"),
]
NOBODY = 65534
MAX_MEMORY = 200 << 10  # KiB, of all processes of root's
MAX_THREADS = 50
TRUE = base64.b64encode(b"#!/bin/sh\n").decode()


@pytest.fixture
def site():
    with fresh_site() as site:
        site.root.chmod(0o755)
        yield site


def roots(site) -> list[int]:
    """Return the service and what accepts its clients."""
    first = site.process.pid
    return [first, *(pid for pid in children(first) if "acceptor" in command(pid))]


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode()


def status(pid: int, key: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{key}:"))
    return int(line.split()[1])


def is_well(site) -> None:
    """Another user's job runs to its end, and root's processes are what they were."""
    assert site.submit("-W", "block=true", site.script("#!/bin/sh\nexit 3\n")) == 3
    assert sum(status(pid, "VmHWM") for pid in roots(site)) < MAX_MEMORY
    assert sum(status(pid, "Threads") for pid in roots(site)) < MAX_THREADS


@contextlib.contextmanager
def attacker(attack, *args):
    """Have another user attack, in a process of its own, which says when it has begun."""
    told, tell = os.pipe()

    def run() -> None:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        attack(lambda: os.write(tell, b"!"), *args)

    process = multiprocessing.get_context("fork").Process(target=run, daemon=True)
    process.start()
    os.close(tell)
    assert os.read(told, 1) == b"!"
    os.close(told)
    try:
        yield process.pid
    finally:
        process.kill()  # it ends when what it has open lets it


def connect(path: str) -> socket.socket:
    client = socket.socket(socket.AF_UNIX)
    client.connect(path)
    return client


def send_descriptors(begun, path, file, times):
    held = os.open(file, os.O_RDONLY)
    clients = []
    for _ in range(times):
        clients.append(connect(path))
        with contextlib.suppress(OSError):  # refused
            socket.send_fds(clients[-1], [b"{"], [held] * 3)
            clients[-1].shutdown(socket.SHUT_WR)
    begun()
    signal.pause()


def test_descriptors_that_cannot_be_closed(site):
    """close(2) of a FUSE file whose FLUSH is never answered."""
    path = str(site.paths.run / "local.sock")
    with (
        fuse_server.mounted(site.root / "fuse", [fuse_server.FLUSH]) as file,
        attacker(send_descriptors, path, file, 1000),
    ):
        is_well(site)
        theirs = children(roots(site)[1])
        assert len(theirs) <= 105, "as many as a user may have, and some that close the rest"
        assert site.submit("-W", "block=true", site.script("#!/bin/sh\nexit 4\n")) == 4


HELD = """
import ctypes, mmap, os, sys, threading, time
file = os.open(sys.argv[1], os.O_RDONLY)
libc, pipe = ctypes.CDLL(None), os.pipe()
libc.mmap.restype = ctypes.c_void_p
at = libc.mmap(None, ctypes.c_size_t(4096), 1, 2, file, ctypes.c_long(0))
print("begun", flush=True)
# A fault inside the kernel. The first answer is an error: it is tried again, with the lock held.
threading.Thread(target=libc.write, args=(pipe[1], ctypes.c_void_p(at), 1)).start()
while True:
    mmap.mmap(-1, 1 << 20)  # waits for the lock; who comes later waits for this
"""


def test_a_process_whose_memory_waits_for_a_file_system(site):
    """Nobody can read its /proc/PID/environ: its memory map is locked by a fault."""
    argv = ["/usr/bin/python3", "-I", "-S", "-c", HELD]  # theirs to run
    with fuse_server.mounted(site.root / "fuse", [fuse_server.READ], [fuse_server.READ]) as file:
        how = {"stdout": subprocess.PIPE, "user": NOBODY, "group": NOBODY}
        stranger = subprocess.Popen([*argv, str(file)], **how)
        assert stranger.stdout.readline() == b"begun\n"
        eventually(lambda: reading_hangs(stranger.pid))
        is_well(site)
        stranger.kill()
        stranger.stdout.close()
    stranger.wait(LONG)


def test_a_job_whose_output_hangs_does_not_keep_its_slot():
    """Not even SIGKILL ends the process that opens it."""
    with fresh_site(slots=1) as site:
        site.root.chmod(0o755)
        with fuse_server.mounted(site.root / "fuse", [fuse_server.OPEN]) as file:
            assert site.submit("-o", str(file), site.script("#!/bin/sh\n")) == 0
            eventually(lambda: any(map(opening_hangs, of_all_threads(site.process.pid))))
            site.submitter.cancel(f"1.{HOST}")
            is_well(site)


def of_all_threads(pid: int) -> list[int]:
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(each) for path in lists for each in path.read_text().split()]


def opening_hangs(pid: int) -> bool:
    with contextlib.suppress(OSError):  # it has ended
        return "become_job" in command(pid) and "fuse" in Path(f"/proc/{pid}/stack").read_text()
    return False


def reading_hangs(pid: int) -> bool:
    reader = subprocess.Popen(["cat", f"/proc/{pid}/environ"], stdout=subprocess.DEVNULL)
    try:
        reader.wait(1)
    except subprocess.TimeoutExpired:
        return True
    finally:
        reader.kill()
        reader.wait(LONG)
    return False


def send_bombs(begun, path, times):
    bomb = b'{"op": "list", "x": [' + b'{"":0},' * 1_100_000 + b"0]}\n"
    clients = [connect(path) for _ in range(times)]
    for client in clients:
        with contextlib.suppress(OSError):
            client.sendall(bomb)
    begun()
    signal.pause()


def test_messages_that_unfold(site):
    """8 MiB that take 250 MB of memory each: of who sent them."""
    with attacker(send_bombs, str(site.paths.run / "local.sock"), 6):
        is_well(site)


FORGED = """
import os, struct, sys, time
from vtorque_local import acceptor, client

RECORDS = eval(sys.argv.pop(1))

def serve(connection, service, reading, limits):
    connection.recv(1)
    for record in RECORDS:
        try:
            length = b"" if record[:1] == b"!" else struct.pack("!I", len(record))
            os.write(service.ask, length + record)
        except OSError:
            break
        time.sleep(0.02)
    connection.sendall(os.read(service.hear, 4096))
    time.sleep(0.5)

client.serve = serve
acceptor.main()
"""
SUBMIT_I = b"submit\0x\x000\x000\x001\0\0"
RECORDS = [
    [b"ended"],
    [b"ended\x001", b"ended\x001"],
    [SUBMIT_I, b"ended"],
    [SUBMIT_I, b"ended\0-" + b"9" * 4300],
    [SUBMIT_I, b"ended\x001", b"ended\x001", b"ended\x001"],
    [SUBMIT_I, SUBMIT_I],
    [b"submit\0x\x000\x000\x000\0\0" + b"\0" * 70],
    [b"submit\0../x\x0099999999999\x000\x000\0\0"],
    [b"list"] * 50,
    [b"list", b"stop", b"cancel\x001"],
    [b"!" * 9000],
    [b"\xff\xfe", b""],
]


@pytest.mark.parametrize("records", RECORDS, ids=range(len(RECORDS)))
def test_forged_records(records):
    """What a user's process may say to the service, were it not ours."""
    forging = [sys.executable, "-I", "-c", FORGED, repr(records)]
    with fresh_site(acceptor=forging) as site:
        path = str(site.paths.run / "local.sock")
        for _ in range(3):
            with connect(path) as client:
                client.settimeout(LONG)
                client.sendall(b"x")
                client.recv(4096)  # an answer, or nothing: it may have been ended with its job
        assert site.process.is_alive()
        assert site.stop() == 0, (site.root / "log").read_text()
        assert "Traceback" not in (site.root / "log").read_text()


def submission(**change) -> bytes:
    argv = ["-S", "/bin/sh", "-o", "/dev/null", "-e", "/dev/null"]
    message = {"op": "submit", "argv": argv, "token": "", "cwd": "/", "environ": {}, "script": TRUE}
    return json.dumps(message | change).encode() + b"\n"


def ask(path: str, data: bytes) -> dict:
    with connect(path) as client:
        client.sendall(data)
        with client.makefile("rb") as answer:
            return json.loads(answer.readline())


def fill(begun, path, environ, times, answers):
    large = submission(argv=["-V", "-S", "/bin/sh"], environ={"A": "x" * environ})
    Path(answers).write_text(json.dumps([ask(path, large) for _ in range(times)]))
    begun()


def test_environments_do_not_fill_roots_disk(site):
    (site.root / "prologue.hold").touch()  # all stay queued, or in the prologue
    answers = site.root / "answers"
    answers.touch()
    answers.chmod(0o666)
    path = str(site.paths.run / "local.sock")
    with attacker(fill, path, 7 << 20, 12, str(answers)):
        pass
    told = json.loads(answers.read_text())
    taken = [answer for answer in told if "id" in answer]
    assert len(taken) == (64 << 20) // (7 << 20)
    assert "(limit: 67108864)" in told[-1]["error"]
    used = sum(p.stat().st_size for p in (site.spool / "jobs").rglob("*") if p.is_file())
    assert used < 70 << 20
    (site.root / "prologue.hold").unlink()
    is_well(site)


def flood(begun, path, jobs):
    for _ in range(jobs):
        assert "id" in ask(path, submission())
    begun()


def test_a_flood_of_jobs_takes_turns_with_others(site):
    """Who was served longest ago is next, so that one job waits for one, not for all."""
    (site.root / "prologue.hold").touch()
    with attacker(flood, str(site.paths.run / "local.sock"), 40):
        pass
    site.submit(site.script("#!/bin/sh\n"))
    (site.root / "prologue.hold").unlink()
    assert site.done("41") == 0
    begun = [p.name.split(".")[1] for p in site.root.glob(f"prologue.*.{HOST}")]
    assert len(begun) < 10, "it was not the last"
    eventually(lambda: not list((site.spool / "jobs").iterdir()))
