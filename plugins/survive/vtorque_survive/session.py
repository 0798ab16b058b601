"""Read the state of a job shell's session with the guest. Runs as root, in the watcher.

The job shell of the restored job resumes the session with this state. The state comes through a
FIFO in the guest's run directory. Root does not parse the state, because the user controls it.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from vtorque_core.api import HostFault, Refused, name_errors
from vtorque_core.api.children import wait_readable

_LEAVES = 20.0  # seconds for the job shell to write its state
_POLL = 0.05  # seconds between two reads of a FIFO without a writer
_MOST = 96 << 20  # bytes of the state: twice what a session may have in flight


def make(fifo: Path, uid: int) -> None:
    """Create a FIFO to which a job shell writes its state. Only the shell's user may write."""
    with name_errors(f"cannot create {fifo}"):
        if not fifo.exists():
            os.mkfifo(fifo, 0o600)
        os.chown(fifo, uid, -1, follow_symlinks=False)


def read_state(fifo: Path) -> bytes:
    """Return the state of the session in which the job shell runs the script.

    Raises:
        Refused: If the script does not run.
        HostFault: If the job shell does not answer.
    """
    if line := _line(fifo):
        return line
    raise Refused(
        "the job's script is not running: vm_prologue has not ended yet, or an epilogue already "
        "runs. Retry while the script runs"
    )


def _line(fifo: Path) -> bytes:
    """Return the last complete line. The user controls the FIFO, so a timeout applies."""
    descriptor = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    until, said = time.monotonic() + _LEAVES, bytearray()
    try:
        while (left := until - time.monotonic()) > 0:
            data = None
            with suppress(BlockingIOError):  # another writer has just opened it
                data = os.read(descriptor, 1 << 20) if wait_readable([descriptor], left) else None
            said += data or b""
            if data == b"":  # no writer: poll(2) would return at once
                _, begins, line = bytes(said).removesuffix(b"\n").rpartition(b"\n")
                if begins and said.endswith(b"\n"):
                    return line
                said.clear()  # the rest of a killed writer or reader
                time.sleep(_POLL)
            if len(said) > _MOST:
                raise HostFault("the job shell's answer is too long")
    finally:
        os.close(descriptor)
    raise HostFault("the job shell has not sent its session state in time")
