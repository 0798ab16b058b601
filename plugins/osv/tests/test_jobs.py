"""The job wrapper with a real root process, recorded consoles, and signals."""

import os
import signal
import socket
import threading
import time
from pathlib import Path

import pytest
from vtorque_osv import jobs
from vtorque_osv.console import BEGIN
from vtorque_osv.order import PROPERTIES, BootOrder, GuestProperties

from as_root import without_chown
from vtorque_core.api import Refused
from vtorque_core.api.guest_driver import (
    ORDER_SOCKET,
    BootedGuest,
    GuestDied,
    ReadyGuest,
    Script,
    Streams,
)
from vtorque_core.resources.starter import BootStarter

DATA = Path(__file__).parent / "data"


class RootThread:
    """Root's process as a thread; each guest's console is a socket that sends recorded output."""

    def __init__(self, run_dir, consoles, hold=()):
        self.orders, self.ends = [], []
        self._consoles, self._hold = consoles, hold
        path = str(run_dir / ORDER_SOCKET)
        starter = BootStarter(socket=path, uid=os.getuid(), boot=self.boot)
        ready = threading.Event()
        self.thread = threading.Thread(target=starter.serve, args=(ready.set,), daemon=True)
        self.thread.start()
        assert ready.wait(30)

    def boot(self, order):
        self.orders.append(BootOrder.decode(order))
        found = []
        for rank, data in enumerate(self._consoles):
            ours, theirs = socket.socketpair()
            threading.Thread(target=self._say, args=(ours, data, rank), daemon=True).start()
            found.append(BootedGuest(f"vn1-{rank}", rank, theirs.detach()))
        return found

    def _say(self, ours, data, rank):
        with ours:
            ours.sendall(data)
            if rank in self._hold:
                self.ends.append(ours)
                threading.Event().wait(90)


@pytest.fixture
def outputs(tmp_path):
    with (tmp_path / "out").open("wb") as out, (tmp_path / "err").open("wb") as err:
        yield Streams(None, out.fileno(), err.fileno())


@pytest.fixture
def run_dir(tmp_path, monkeypatch):
    without_chown(monkeypatch)
    path = tmp_path / "job" / "g0"
    path.mkdir(parents=True)
    properties = GuestProperties(
        mode="cmdline", address="", begin=BEGIN, named={"greet": "/hello hi"}
    )
    (path / PROPERTIES).write_bytes(properties.encode())
    return path


def recorded(name):
    return (DATA / f"{name}.console").read_bytes()


def run(run_dir, streams, script="/hello x\n", **fields):
    guest = ReadyGuest("vt-1", "vn1", 0, run_dir)
    values = {"environ": {"A": "1", "PATH": "/bin"}, "cwd": "/home/ada"} | fields
    return jobs.run(guest, Script(name="j", content=script.encode(), **values), streams)


def output_of(tmp_path):
    return (tmp_path / "out").read_bytes(), (tmp_path / "err").read_bytes()


def test_job_runs_to_its_exit_code(tmp_path, run_dir, outputs):
    root = RootThread(run_dir, [recorded("ret42")])
    assert run(run_dir, outputs, "#!/bin/sh\n/hello ret 42\n") == 42
    assert output_of(tmp_path) == (b"will return 42\n", b"")
    assert root.orders == [BootOrder(b"#!/bin/sh\n/hello ret 42\n", {"A": "1"}, "/home/ada")]


def test_crash_is_reported_with_its_backtrace(tmp_path, run_dir, outputs):
    RootThread(run_dir, [recorded("segv")])
    assert run(run_dir, outputs) == 139
    out, err = output_of(tmp_path)
    assert out == b"will crash\n"
    first, *rest = err.decode().splitlines()
    assert first.startswith("vtorque: vn1-0: the program crashed")
    assert all(line.startswith("| ") for line in rest)
    assert rest


def test_osv_that_does_not_boot_is_a_dead_guest(tmp_path, run_dir, outputs):
    RootThread(run_dir, [recorded("ret0")[:300]])
    with pytest.raises(GuestDied, match="before it started the job"):
        run(run_dir, outputs)
    assert b"| OSv v0.57" in output_of(tmp_path)[1]


def test_job_of_several_guests_ends_with_the_first_failing_code(tmp_path, run_dir, outputs):
    RootThread(run_dir, [recorded("ret0"), recorded("exit7"), recorded("ret42")])
    assert run(run_dir, outputs) == 7
    assert sorted(output_of(tmp_path)[0].splitlines()) == [
        b"vn1-0: hello",
        b"vn1-1: will exit 7",
        b"vn1-2: will return 42",
    ]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_batch_system_signal_ends_the_job(tmp_path, run_dir, outputs, number):
    RootThread(run_dir, [BEGIN.encode() + b"\r\nlooping\r\n"], hold={0})
    before = signal.getsignal(number)

    def when_it_loops():
        while not output_of(tmp_path)[0]:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGUSR1)  # does nothing
        os.kill(os.getpid(), number)

    threading.Thread(target=when_it_loops).start()
    assert run(run_dir, outputs) == 128 + number
    assert output_of(tmp_path) == (b"looping\n", b"")
    assert signal.getsignal(number) is before


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"script": "cd /\n"}, "line 1"),
        ({"interactive": True}, "interactive"),
        ({"args": ("1",)}, "cannot have arguments"),
    ],
)
def test_invalid_job_is_refused_before_the_boot(run_dir, outputs, fields, why):
    root = RootThread(run_dir, [])
    with pytest.raises(Refused, match=why):
        run(run_dir, outputs, **fields)
    assert root.orders == []


def test_closed_output_does_not_stop_the_job(run_dir):
    RootThread(run_dir, [recorded("ret42")])
    reader, writer = os.pipe()
    os.close(reader)
    before = signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    try:
        assert run(run_dir, Streams(None, writer, writer)) == 42
    finally:
        signal.signal(signal.SIGPIPE, before)
        os.close(writer)
