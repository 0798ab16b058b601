"""Send root the state of the agent session when root checkpoints a guest.

The job shell of a restored job resumes the session from this state. Root requests the state by
creating a FIFO in the guest's run directory, and removes the FIFO after reading. The state is
untrusted, because the user's process writes it.

Privileges: the job's user.
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

_POLL = 0.05  # seconds between two checks whether root has read the state
_AGAIN = 2.0  # seconds after which root is considered killed, and the state is sent again


def is_detach_requested(guest: ReadyGuest) -> bool:
    """Return whether root has asked the job shell to send the session state and exit."""
    return (guest.run_dir / LEAVE).exists()


def send_state(guest: ReadyGuest, state: SessionState) -> None:
    """Send root the session state through the FIFO ``LEAVE`` until root has removed the FIFO.

    Root creates this FIFO to request the state, and removes the FIFO after reading the state. The
    state is sent again every two seconds, because the reading process may be killed.
    """
    while is_detach_requested(guest):
        with suppress(OSError):  # no reader
            _write(guest.run_dir / LEAVE, state.to_json)
            again = time.monotonic() + _AGAIN
            while is_detach_requested(guest) and time.monotonic() < again:
                time.sleep(_POLL)
        time.sleep(_POLL)


class StateSender:
    """A sender of the session state to root, while the script continues to run."""

    def __init__(self, guest: ReadyGuest, runs: Callable[[], bool]) -> None:
        self._path, self._runs, self._again = guest.run_dir / TELL, runs, 0.0

    def __call__(self, state: Callable[[], SessionState]) -> bool:
        """Send root the session state if root requests it; return whether the request still exists.

        The request is the FIFO ``TELL``. The job shell of a restored job can continue a script, but
        not a user's prologue or an epilogue. While one of these runs, the sent state is therefore
        empty, and root refuses to save the job.
        """
        if time.monotonic() >= self._again:
            with suppress(OSError):  # no reader, or no request
                _write(self._path, lambda: state().to_json() if self._runs() else "")
                self._again = time.monotonic() + _AGAIN
        asks = self._path.exists()
        if not asks:
            self._again = 0.0  # root has read the state; the next request is a new one
        return asks


def _write(path: Path, text: Callable[[], str]) -> None:
    """Call ``text``, and write the result to a FIFO. Raises OSError if the FIFO has no reader."""
    flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags)
    os.set_blocking(descriptor, True)
    with os.fdopen(descriptor, "wb", buffering=0) as fifo:
        data = b"\n" + text().encode() + b"\n"
        while data:
            data = data[fifo.write(data) :]


def received_state(guest: ReadyGuest) -> SessionState | None:
    """Return the state of the session that this job shell must resume, or None for a new job.

    Raises HostFault.
    """
    try:
        return SessionState.from_json((guest.run_dir / LEFT).read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise HostFault(
            f"cannot read the session state of the previous job shell: {error}"
        ) from None
