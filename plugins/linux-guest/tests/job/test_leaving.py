"""What a job shell leaves for another one, through root's FIFO and its file."""

import os
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from vtorque_core.api import HostFault
from vtorque_core.api.guest_driver import LEAVE, LEFT
from vtorque_linux_guest.job import leaving
from vtorque_linux_guest.job.session_state import SessionState

STATE = SessionState(
    b"12345678", 1, 2, 3, b"kept", 4, 5, True, (6, 7), (8, 9), (False, True), (10, 11),
    (b"out", b"\n"), ("stderr: full",), (None, 9),
)  # fmt: skip


def test_it_is_a_line_between_two_ends_of_lines_until_the_fifo_is_gone(tmp_path: Path) -> None:
    guest = SimpleNamespace(run_dir=tmp_path)
    assert leaving.left(guest) is None
    fifo = tmp_path / LEAVE
    os.mkfifo(fifo)
    thread = threading.Thread(target=leaving.leave, args=(guest, STATE))
    thread.start()
    said = fifo.read_bytes()
    assert thread.is_alive()
    fifo.unlink()
    thread.join()
    assert said[:1] + said[-1:] == b"\n\n" and said.count(b"\n") == 2
    (tmp_path / LEFT).write_bytes(said[1:-1])
    assert leaving.left(guest) == STATE


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", '{"nonce": 1}'])
def test_what_is_none_is_said_in_a_line(tmp_path: Path, text: str) -> None:
    (tmp_path / LEFT).write_text(text)
    with pytest.raises(HostFault, match="cannot be read"):
        leaving.left(SimpleNamespace(run_dir=tmp_path))
