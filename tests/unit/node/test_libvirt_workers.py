"""Slots for libvirtd's worker threads: one job may hold eight, other jobs one each."""

import contextlib
import threading
import time
from pathlib import Path

import pytest

from patience import LONG
from vtorque_core.base.errors import HostFault
from vtorque_core.base.locks import ANYBODYS, ONE_EACH, libvirt_worker
from vtorque_core.base.names import Paths

MANY, OTHER = 1001, 1002
NONE = threading.Event()  # no guest has failed


@pytest.fixture
def paths(tmp_path: Path) -> Paths:
    return Paths(run=tmp_path)


@pytest.fixture
def held_worker(paths: Paths) -> contextlib.ExitStack:
    with contextlib.ExitStack() as stack:
        for _ in range(len(ANYBODYS) + 1):
            stack.enter_context(libvirt_worker(paths, MANY, 0, NONE))
        yield stack


def test_user_gets_eight_slots_and_then_one_per_job(
    paths: Paths, held_worker: contextlib.ExitStack
) -> None:
    with (
        pytest.raises(HostFault, match="no worker of libvirtd became free in time"),
        libvirt_worker(paths, MANY, 0, NONE),
    ):
        pass


def test_ten_other_users_get_one_slot_each(paths: Paths, held_worker: contextlib.ExitStack) -> None:
    others = range(OTHER, OTHER + len(ONE_EACH) - 1)
    for uid in others:
        held_worker.enter_context(libvirt_worker(paths, uid, 0, NONE))
    with pytest.raises(HostFault), libvirt_worker(paths, others.stop, 0, NONE):
        pass


def test_waiting_start_continues_when_a_slot_is_released(
    paths: Paths, held_worker: contextlib.ExitStack
) -> None:
    def wait() -> None:
        with libvirt_worker(paths, MANY, time.monotonic() + LONG, NONE):
            pass

    waiting = threading.Thread(target=wait)
    waiting.start()
    held_worker.close()
    waiting.join(LONG)
    assert not waiting.is_alive()


def test_waiting_start_ends_when_its_job_has_failed(
    paths: Paths, held_worker: contextlib.ExitStack
) -> None:
    failed = threading.Event()
    failed.set()
    with (
        pytest.raises(HostFault, match="another guest of the job"),
        libvirt_worker(paths, MANY, time.monotonic() + LONG, failed),
    ):
        pass
