"""I/O threads of a guest and their load, in a recorded and in the real /proc."""

import ctypes
import os
import threading
import time
from pathlib import Path

import pytest

from patience import eventually
from vtorque_iocm import threads

pytestmark = pytest.mark.e2e

USER = "7 (x) S 1 7 7 0 -1 4194560 0 0"
KERNEL = "8 (vhost-100) S 2 0 0 0 -1 2129984 0 0"  # with PF_KTHREAD


@pytest.fixture
def proc(tmp_path):
    """Return a function that makes a thread: of QEMU (pid 100), or a process."""

    def make(tid, comm, times="0 0 1", of=None, stat=USER):
        path = tmp_path / (f"{of}/task/{tid}" if of else str(tid))
        path.mkdir(parents=True, exist_ok=True)
        (path / "comm").write_text(f"{comm}\n")
        (path / "schedstat").write_text(f"{times}\n")
        (path / "stat").write_text(f"{stat}\n")
        return path

    make(100, "qemu-system-x86")
    make(100, "qemu-system-x86", "1000 100 5", of=100)
    make(101, "IO iothread1", "2000 200 5", of=100)
    make(102, "CPU 0/KVM", "9000 900 5", of=100)
    make(103, "CPU 12/TCG", "9000 900 5", of=100)
    make(104, "worker", "30 3 5", of=100)
    (tmp_path / "self").symlink_to("100")
    (tmp_path / "uptime").touch()
    return make


def test_all_threads_except_vcpus_count_as_io(proc, tmp_path):
    assert threads.thread_times(tmp_path / "100", ()) == {"100": 1100, "101": 2200, "104": 33}


def test_vhost_workers_are_threads_of_qemu_since_linux_6_4(proc, tmp_path):
    worker = proc(105, "vhost-100", "7000 0 1", of=100)
    found = threads.vhost_threads(tmp_path / "100")
    assert found == [worker]
    assert threads.thread_times(tmp_path / "100", found)["105"] == 7000


def test_vhost_workers_were_kernel_threads(proc, tmp_path):
    worker = proc(8, "vhost-100", "7000 0 1", stat=KERNEL)
    proc(9, "vhost-200", stat=KERNEL.replace("100", "200"))
    assert threads.vhost_threads(tmp_path / "100") == [worker]
    assert threads.thread_times(tmp_path / "100", [worker])["8"] == 7000


def test_user_process_named_like_a_vhost_thread_is_ignored(proc, tmp_path):
    proc(10, "vhost-100", stat=USER.replace("(x)", "(vhost-100)"))
    proc(11, "vhost-100", stat="")
    assert threads.vhost_threads(tmp_path / "100") == []


def test_ended_process_has_no_threads(tmp_path):
    assert threads.thread_times(tmp_path / "100", [tmp_path / "8"]) == {}
    assert threads.vhost_threads(tmp_path / "100") == []


def test_load_is_run_time_plus_wait_time():
    before = {"1": 10**9, "2": 5 * 10**9}
    assert threads.load(before, {"1": 2 * 10**9, "2": 5 * 10**9}, 2.0) == 0.5
    assert threads.load(before, {"1": 10**9, "3": 10**9}, 1.0) == 1.0  # 3 is new
    assert threads.load(before, {"2": 10**9}, 1.0) == 1.0  # another thread, named 2


def test_real_thread_is_measured_and_pinned():
    stop, tids = threading.Event(), []

    def spin():
        ctypes.CDLL(None).prctl(15, f"vhost-{os.getpid()}".encode(), 0, 0, 0)  # PR_SET_NAME
        tids.append(threading.get_native_id())
        while not stop.is_set():
            pass

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        me = Path("/proc", str(os.getpid()))
        eventually(lambda: tids and threads.vhost_threads(me))
        found = threads.vhost_threads(me)
        assert [int(path.name) for path in found] == tids

        clock = time.pthread_getcpuclockid(thread.ident)  # regardless of the machine's load
        at = time.monotonic()
        begun = time.clock_gettime(clock)
        first = threads.thread_times(me, found)
        eventually(lambda: time.clock_gettime(clock) > begun + 0.5)
        load = threads.load(first, threads.thread_times(me, found), 0.5)
        most = threading.active_count() * (time.monotonic() - at) / 0.5 + 0.1
        assert 0.9 < load < most, "not the load of one busy thread"
        cpu = min(os.sched_getaffinity(0))
        threads.pin([*found, Path("/proc/999999999")], [cpu])
        assert os.sched_getaffinity(tids[0]) == {cpu}
    finally:
        stop.set()
        thread.join()
