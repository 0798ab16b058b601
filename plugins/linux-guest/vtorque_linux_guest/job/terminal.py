"""Put the user's terminal into raw mode while the job uses it. Runs in the job shell."""

from __future__ import annotations

import contextlib
import os
import signal
import termios
import tty
from collections.abc import Iterator

from vtorque_linux_guest.job.events import Events


def terminal_size(fd: int) -> tuple[int, int]:
    """Return rows and columns, 24 by 80 if the terminal has no size (tty_ioctl(4))."""
    try:
        size = os.get_terminal_size(fd)
    except OSError:
        return 24, 80
    return size.lines or 24, size.columns or 80


@contextlib.contextmanager
def raw_terminal(fd: int, events: Events) -> Iterator[None]:
    """Return a context with the terminal in raw mode, so that only the guest's terminal echoes.

    Forwards changes of the window size to ``events``.
    """
    before = termios.tcgetattr(fd)
    resized = signal.signal(signal.SIGWINCH, lambda *_: events.winsize(*terminal_size(fd)))
    try:
        tty.setraw(fd, termios.TCSADRAIN)  # keeps what was typed before
        yield
    finally:
        signal.signal(signal.SIGWINCH, resized)
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
