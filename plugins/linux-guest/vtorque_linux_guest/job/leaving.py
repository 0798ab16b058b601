"""How a job shell leaves a script that runs in a guest which is being saved, and another goes on.

Or tells what another one would need, and goes on itself, as the guest does.

As the job's user. Root asks by a FIFO in the guest's run directory, and has taken what is written
to it when it is gone. What was written is the user's own, and so is what is read back.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from vtorque_core.api import HostFault
from vtorque_core.api.guest_driver import LEAVE, LEFT, TELL, ReadyGuest
from vtorque_linux_guest.job.session_state import SessionState

_LOOK = 0.05  # seconds between two looks whether root reads, or has taken it
_AGAIN = 2.0  # seconds until root counts as killed, and another reads all of it anew


def is_asked(guest: ReadyGuest) -> bool:
    """Return whether root asks the job shell to leave when its guest is gone."""
    return (guest.run_dir / LEAVE).exists()


def leave(guest: ReadyGuest, state: SessionState) -> None:
    """Give root what another job shell needs; return when it has taken it, or given up."""
    while is_asked(guest):
        with suppress(OSError):  # nobody reads it now
            _write(guest.run_dir / LEAVE, state.to_json)
            again = time.monotonic() + _AGAIN
            while is_asked(guest) and time.monotonic() < again:
                time.sleep(_LOOK)
        time.sleep(_LOOK)


class Telling:
    """Tells root what another job shell needs, while the script runs on: nothing if none does."""

    def __init__(self, guest: ReadyGuest, runs: Callable[[], bool]) -> None:
        self._path, self._runs, self._again = guest.run_dir / TELL, runs, 0.0

    def __call__(self, state: Callable[[], SessionState]) -> bool:
        """Tell it if root reads now; return whether root asks, so that it is to be called again."""
        if time.monotonic() >= self._again:
            with suppress(OSError):  # nobody reads it now, or asks
                _write(self._path, lambda: state().to_json() if self._runs() else "")
                self._again = time.monotonic() + _AGAIN
        asks = self._path.exists()
        if not asks:
            self._again = 0.0  # root has taken it: who asks next does so for another time
        return asks


def _write(path: Path, text: Callable[[], str]) -> None:
    """Write the text of when it is read. Raises OSError."""
    flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags)
    os.set_blocking(descriptor, True)
    with os.fdopen(descriptor, "wb", buffering=0) as fifo:
        data = b"\n" + text().encode() + b"\n"
        while data:
            data = data[fifo.write(data) :]


def left(guest: ReadyGuest) -> SessionState | None:
    """Return what another job shell has left, if this one is to go on. Raises HostFault."""
    try:
        return SessionState.from_json((guest.run_dir / LEFT).read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise HostFault(f"what the job shell has left cannot be read: {error}") from None
