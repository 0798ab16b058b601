"""Session state that a job shell hands to its successor, also while its script runs."""

import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from vtorque_core.api import HostFault
from vtorque_core.api.guest_driver import LEAVE, LEFT, TELL, ReadyGuest
from vtorque_linux_guest.job import handover
from vtorque_linux_guest.job.session_state import SessionState

STATE = SessionState(
    b"12345678", 1, 2, 3, b"kept", 4, 5, True, (6, 7), (8, 9), (False, True), (10, 11),
    (b"out", b"\n"), ("stderr: full",), (None, 9),
)  # fmt: skip
LONG = SessionState(
    b"12345678", 1 << 18, 7, 5, b"x" * 300_000, 0, 9, True,
    (1, 2), (0, 0), (False, True), (3, 4), (b"a", b""), (), None,
)  # fmt: skip


def test_session_state_is_written_until_the_fifo_is_removed(tmp_path: Path) -> None:
    guest = SimpleNamespace(run_dir=tmp_path)
    assert handover.received_state(guest) is None
    fifo = tmp_path / LEAVE
    os.mkfifo(fifo)
    thread = threading.Thread(target=handover.send_state, args=(guest, STATE))
    thread.start()
    said = fifo.read_bytes()
    assert thread.is_alive()
    fifo.unlink()
    thread.join()
    assert said[:1] + said[-1:] == b"\n\n" and said.count(b"\n") == 2
    (tmp_path / LEFT).write_bytes(said[1:-1])
    assert handover.received_state(guest) == STATE


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", '{"nonce": 1}'])
def test_invalid_session_state_is_reported_in_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / LEFT).write_text(text)
    with pytest.raises(HostFault, match="cannot read the session state"):
        handover.received_state(SimpleNamespace(run_dir=tmp_path))


@pytest.fixture
def guest(tmp_path: Path) -> ReadyGuest:
    return ReadyGuest("vt-1", "vn1", 0, tmp_path)


def read(path: Path) -> str:
    with path.open() as fifo:
        return fifo.read()


def test_no_state_is_written_without_a_request(guest: ReadyGuest) -> None:
    assert not handover.StateSender(guest, lambda: True)(lambda: LONG)


def test_state_is_read_when_the_reader_is_ready(guest: ReadyGuest) -> None:
    os.mkfifo(guest.run_dir / TELL)
    asked = []
    telling = handover.StateSender(guest, lambda: True)
    for _ in range(3):
        assert telling(lambda: asked.append(1) or LONG)
    assert not asked, "the state was read before there was a reader"


def test_state_is_written_once_per_reader(
    guest: ReadyGuest, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, telling = guest.run_dir / TELL, handover.StateSender(guest, lambda: True)
    os.mkfifo(path)
    monkeypatch.setattr(handover, "_AGAIN", 600.0)
    for how in ("first", "the first one was killed", "the first one has taken it"):
        if how == "the first one was killed":
            telling._again = 0.0
        elif how == "the first one has taken it":
            path.unlink()
            assert not telling(lambda: LONG)
            os.mkfifo(path)
        said: list[str] = []
        reads = threading.Thread(target=lambda to: to.append(read(path)), args=(said,))
        reads.start()
        while not said:
            assert telling(lambda: LONG), "the sender stopped before root has read the state"
        reads.join()
        assert SessionState.from_json(said[0].strip()) == LONG
    path.unlink()
    assert not telling(lambda: LONG)


def test_request_without_a_running_script_gets_an_empty_line(guest: ReadyGuest) -> None:
    path = guest.run_dir / TELL
    os.mkfifo(path)
    said: list[str] = []
    reads = threading.Thread(target=lambda: said.append(read(path)))
    reads.start()
    telling = handover.StateSender(guest, lambda: False)
    while not said:
        assert telling(lambda: LONG)
    reads.join()
    assert said == ["\n\n"]


def test_killed_reader_does_not_block_the_writer(guest: ReadyGuest) -> None:
    path = guest.run_dir / TELL
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    closes = threading.Timer(0.2, os.close, (reader,))  # a pipe holds less than the state
    closes.start()
    assert handover.StateSender(guest, lambda: True)(lambda: LONG)
    closes.join()
