"""The user's terminal while their job has one."""

import os
import pty
import select
import signal

from vtorque_linux_guest.job.events import Events
from vtorque_linux_guest.job.terminal import raw_terminal


def test_what_was_typed_before_it_is_raw_is_the_guests():
    master, terminal = pty.openpty()
    before = signal.getsignal(signal.SIGWINCH)
    events = Events()
    try:
        os.write(master, b"ls\n")
        with raw_terminal(terminal, events):
            assert select.select([terminal], [], [], 10)[0], "it was thrown away"
            assert os.read(terminal, 16) == b"ls\n"
            os.write(master, b"\x03")
            assert os.read(terminal, 16) == b"\x03"
        assert signal.getsignal(signal.SIGWINCH) is before
    finally:
        events.close()
        os.close(master)
        os.close(terminal)
