"""No user keeps all of libvirtd's workers: one job may have eight at once, then one each."""

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
def held(paths: Paths) -> contextlib.ExitStack:
    with contextlib.ExitStack() as stack:
        for _ in range(len(ANYBODYS) + 1):
            stack.enter_context(libvirt_worker(paths, MANY, 0, NONE))
        yield stack


def test_one_user_gets_eight_and_one(paths: Paths, held: contextlib.ExitStack) -> None:
    with (
        pytest.raises(HostFault, match="too many guests are starting at once"),
        libvirt_worker(paths, MANY, 0, NONE),
    ):
        pass


def test_ten_others_get_one_each_meanwhile(paths: Paths, held: contextlib.ExitStack) -> None:
    others = range(OTHER, OTHER + len(ONE_EACH) - 1)
    for uid in others:
        held.enter_context(libvirt_worker(paths, uid, 0, NONE))
    with pytest.raises(HostFault), libvirt_worker(paths, others.stop, 0, NONE):
        pass


def test_who_waits_goes_on_when_one_is_given_back(paths: Paths, held: contextlib.ExitStack) -> None:
    def wait() -> None:
        with libvirt_worker(paths, MANY, time.monotonic() + LONG, NONE):
            pass

    waiting = threading.Thread(target=wait)
    waiting.start()
    held.close()
    waiting.join(LONG)
    assert not waiting.is_alive()


def test_who_waits_for_a_job_that_has_failed_does_not(
    paths: Paths, held: contextlib.ExitStack
) -> None:
    failed = threading.Event()
    failed.set()
    with (
        pytest.raises(HostFault, match="another guest of the job"),
        libvirt_worker(paths, MANY, time.monotonic() + LONG, failed),
    ):
        pass
