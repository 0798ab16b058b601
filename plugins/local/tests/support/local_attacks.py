"""Attacks of one user on the embedded batch system that try to delay other users.

Real FUSE, real floods. Each attack is a context during which it lasts; it yields a function that
returns whether the attack still lasts. As root: the attackers' processes run as the user nobody.
"""

import base64
import contextlib
import json
import multiprocessing
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fuse_server
from local_site import HOST, LocalSite
from patience import LONG, eventually

NOBODY = 65534
TRUE = base64.b64encode(b"#!/bin/sh\n").decode()
ENVIRON = 7 << 20  # bytes of a large environment
Stands = Callable[[], bool]


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def command(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode()


def roots(site: LocalSite) -> list[int]:
    """Return the service and the process that accepts its clients."""
    first = site.process.pid
    return [first, *(pid for pid in children(first) if "acceptor" in command(pid))]


def socket_of(site: LocalSite) -> str:
    return str(site.paths.run / "local.sock")


@contextlib.contextmanager
def attacker(attack: Callable[..., None], *args: object) -> Iterator[int]:
    """Attack as another user in a separate process, which reports its begin."""
    told, tell = os.pipe()

    def run() -> None:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        attack(lambda: os.write(tell, b"!"), *args)

    process = multiprocessing.get_context("fork").Process(target=run, daemon=True)
    process.start()
    try:
        os.close(tell)
        assert os.read(told, 1) == b"!"
        os.close(told)
        yield process.pid
    finally:
        process.kill()  # it ends when its open files allow it


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


@contextlib.contextmanager
def unclosable_descriptors(site: LocalSite) -> Iterator[Stands]:
    """close(2) of a FUSE file whose FLUSH is never answered, in a thousand connections."""

    def is_active() -> bool:
        return any(waits_for_fuse(pid) for pid in children(roots(site)[1]))

    with (
        fuse_server.mounted(site.root / "fuse", [fuse_server.FLUSH]) as file,
        attacker(send_descriptors, socket_of(site), file, 1000),
    ):
        yield is_active


def waits_for_fuse(pid: int) -> bool:
    with contextlib.suppress(OSError):  # it has ended
        return "fuse" in Path(f"/proc/{pid}/stack").read_text()
    return False


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


@contextlib.contextmanager
def unreadable_process(site: LocalSite) -> Iterator[Stands]:
    """Start a process whose /proc/PID/environ hangs: a page fault holds the memory map's lock."""
    argv = ["/usr/bin/python3", "-I", "-S", "-c", HELD]  # allowed for them
    with contextlib.ExitStack() as last:
        silent = [fuse_server.READ], [fuse_server.READ]
        with fuse_server.mounted(site.root / "fuse", *silent) as file:
            how = {"stdout": subprocess.PIPE, "user": NOBODY, "group": NOBODY}
            stranger = subprocess.Popen([*argv, str(file)], **how)
            last.callback(stranger.wait, LONG)
            try:
                assert stranger.stdout.readline() == b"begun\n"
                eventually(lambda: reading_hangs(stranger.pid))
                yield lambda: reading_hangs(stranger.pid)
            finally:
                stranger.kill()
                stranger.stdout.close()


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


@contextlib.contextmanager
def unopenable_output(site: LocalSite) -> Iterator[Stands]:
    """A canceled job whose first program opens its output forever: SIGKILL does not end it.

    The job is root's: the user nobody cannot run a Python in a closed home.
    """

    def is_active() -> bool:
        return any(map(opening_hangs, of_all_threads(site.process.pid)))

    with fuse_server.mounted(site.root / "fuse", [fuse_server.OPEN]) as file:
        assert site.submit("-o", str(file), site.script("#!/bin/sh\n")) == 0
        eventually(is_active)
        site.submitter.cancel(f"{newest(site)}.{HOST}")
        yield is_active


def newest(site: LocalSite) -> int:
    return max(int(path.name) for path in (site.spool / "jobs").iterdir())


def of_all_threads(pid: int) -> list[int]:
    found = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # it has ended
            found += [int(each) for each in path.read_text().split()]
    return found


def opening_hangs(pid: int) -> bool:
    with contextlib.suppress(OSError):  # it has ended
        return "become_job" in command(pid) and waits_for_fuse(pid)
    return False


def send_bombs(begun, path, times):
    bomb = b'{"op": "list", "x": [' + b'{"":0},' * 1_100_000 + b"0]}\n"
    clients = [connect(path) for _ in range(times)]
    for client in clients:
        with contextlib.suppress(OSError):
            client.sendall(bomb)
    begun()
    signal.pause()


@contextlib.contextmanager
def unfolding_messages(site: LocalSite) -> Iterator[Stands]:
    """Six of 8 MiB that take 250 MB of memory each, charged to the sender."""
    with attacker(send_bombs, socket_of(site), 6):
        yield lambda: bool(children(roots(site)[1]))


def submission(**change: object) -> bytes:
    argv = ["-S", "/bin/sh", "-o", "/dev/null", "-e", "/dev/null"]
    message = {"op": "submit", "argv": argv, "token": "", "cwd": "/", "environ": {}, "script": TRUE}
    return json.dumps(message | change).encode() + b"\n"


def ask(path: str, data: bytes) -> dict[str, Any]:
    with connect(path) as client:
        client.sendall(data)
        with client.makefile("rb") as answer:
            return json.loads(answer.readline())


def fill(begun, path, environ, times, answers):
    large = submission(argv=["-V", "-S", "/bin/sh"], environ={"A": "x" * environ})
    Path(answers).write_text(json.dumps([ask(path, large) for _ in range(times)]))
    begun()
    while True:
        ask(path, large)


def flood(begun, path, jobs):
    for _ in range(jobs):
        assert "id" in ask(path, submission())
    begun()


@contextlib.contextmanager
def full_of_environments(site: LocalSite, more: bool = False) -> Iterator[Stands]:
    """Queue as many jobs as fit with environments of 7 MiB; ``more``: continue to send them."""
    with contextlib.ExitStack() as sent:
        with held_prologues(site):
            sent.enter_context(attacker(fill, socket_of(site), ENVIRON, 12, os.devnull))
            if not more:
                sent.close()
        yield lambda: others_wait(site)


@contextlib.contextmanager
def flood_of_jobs(site: LocalSite) -> Iterator[Stands]:
    """Forty jobs queued."""
    with held_prologues(site), attacker(flood, socket_of(site), 40):
        pass
    yield lambda: others_wait(site)


@contextlib.contextmanager
def held_prologues(site: LocalSite) -> Iterator[None]:
    """Hold all jobs in their prologues until the end of the context."""
    hold = site.root / "prologue.hold"
    hold.touch()
    try:
        yield
    finally:
        hold.unlink()


def others_wait(site: LocalSite) -> bool:
    """Return whether more jobs exist than may run at the same time."""
    return len(list((site.spool / "jobs").iterdir())) > site.slots
