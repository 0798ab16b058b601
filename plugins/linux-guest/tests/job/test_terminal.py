"""The user's terminal while a job uses it."""

import os
import pty
import select
import signal

import pytest

from patience import LONG
from vtorque_linux_guest.job.descriptors import InputSource
from vtorque_linux_guest.job.events import Events
from vtorque_linux_guest.job.terminal import raw_terminal


@pytest.mark.parametrize("typed", [b"\x04", b"ls\n\x04", b"ls\x04", b"\x04\x04"])
def test_end_of_input_typed_before_raw_mode_is_passed_to_the_guest(typed):
    """script(1) sends Ctrl-D at once if its input has ended; otherwise the job would never end."""
    master, terminal = pty.openpty()
    events = Events()
    try:
        os.write(master, typed)
        for _ in typed.split(b"\n"):  # the line discipline has processed all of it
            assert select.select([terminal], [], [], LONG)[0]
        with raw_terminal(terminal, events):
            source = InputSource(terminal)
            assert source.read(100) == typed
            os.write(master, b"a\0b")
            assert source.read(100) == b"a\0b", "NUL (Ctrl-@) was changed"
    finally:
        events.close()
        os.close(master)
        os.close(terminal)


def test_input_typed_before_raw_mode_is_sent_to_the_guest():
    master, terminal = pty.openpty()
    before = signal.getsignal(signal.SIGWINCH)
    events = Events()
    try:
        os.write(master, b"ls\n")
        with raw_terminal(terminal, events):
            assert select.select([terminal], [], [], 10)[0], (
                "input typed before raw mode was discarded"
            )
            assert os.read(terminal, 16) == b"ls\n"
            os.write(master, b"\x03")
            assert os.read(terminal, 16) == b"\x03"
        assert signal.getsignal(signal.SIGWINCH) is before
    finally:
        events.close()
        os.close(master)
        os.close(terminal)
