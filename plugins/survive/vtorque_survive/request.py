"""Requests from a job's owner to root's watcher, and the answers.

The owner writes a line to a FIFO (fifo(7)) in root's directory for the job. No other user may write
to the FIFO. Unlike a socket, a FIFO passes no file descriptors. Root never blocks on the FIFO, and
writes the answer to a file among the job's kept records.
"""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from vtorque_core.api import HostFault, Paths, name_errors
from vtorque_core.api.acquired import Resource
from vtorque_core.api.children import wait_readable
from vtorque_core.api.kept_records import Place
from vtorque_core.live import changes

SUSPEND, RESUME, CHECKPOINT, SAVE = "suspend", "resume", "checkpoint", "save"  # job continues
ANSWER = "suspend.json"
_LINE = re.compile(rb"(suspend|resume|checkpoint|save) ([0-9a-f]{16}) ([0-9]{1,9})\n")
_MOST = 4096  # bytes that are read at a time; the rest is dropped
_LAST = 5.0  # seconds for the answer once the job has ended
_BEGINS = 60.0  # seconds until a watcher listens for a new job
_POLL = 0.05  # seconds between two checks for a new job's FIFO


def path_of(paths: Paths, key: str) -> Path:
    """Return the FIFO of a job attempt on this node."""
    return paths.job_run(key) / "suspend.fifo"


@dataclass(frozen=True)
class Fifo(Resource):
    """A FIFO in one of root's directories. Only the user ``uid`` may write to it."""

    kind = "survive-fifo"
    path: str
    uid: int

    def create(self) -> None:
        """Create the FIFO."""
        with name_errors(f"cannot create {self.path}"):
            os.mkfifo(self.path, 0o600)
            os.chown(self.path, self.uid, -1, follow_symlinks=False)

    def release(self) -> None:
        """Remove the FIFO. Idempotent."""
        with name_errors(f"cannot remove {self.path}"):
            Path(self.path).unlink(missing_ok=True)


def listen(path: Path) -> int:
    """Open a FIFO in one of root's directories.

    It is opened for reading and writing, so that reads never reach the end of file.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is not a FIFO")
    return descriptor


def take_request(descriptor: int) -> tuple[str, str, int] | None:
    """Return the last request: its word and token, and the sender's pid. Never blocks."""
    try:
        said = os.read(descriptor, _MOST)
    except OSError:
        return None
    found = _LINE.fullmatch(said[said.rfind(b"\n", 0, -1) + 1 :])
    return (found[1].decode(), found[2].decode(), int(found[3])) if found else None


def answer(place: Place, token: str, text: str, made: str = "") -> None:
    """Write the answer to a request; ignore errors. ``made`` is the id of a created checkpoint."""
    with suppress(OSError, HostFault):
        place.write(ANSWER, json.dumps({"token": token, "said": text, "made": made}).encode())


def last_checkpoint(place: Place) -> str:
    """Return the checkpoint's id from the watcher's last answer to the job's owner."""
    try:
        return str(json.loads(place.read(ANSWER, _MOST))["made"])
    except (OSError, ValueError, TypeError, KeyError):
        raise HostFault(
            "the job is saved, but the checkpoint's id is unknown: vmgr checkpoints lists it"
        ) from None


def ask(path: Path, place: Place, word: str, seconds: float, patience: float = _BEGINS) -> str:
    """Send the request ``word`` as the job's owner or root. Return an error message, or "".

    Wait up to ``patience`` seconds until the guests are ready and a watcher listens. Wait up to
    ``seconds`` for the answer.

    Raises:
        HostFault: If no watcher listens, the job has ended, or there is no answer in time.
    """
    token = os.urandom(8).hex()
    events = changes.events()
    try:
        changes.watch(events, place.directory, content=False)
        fifo = _open_fifo(path, place, events, time.monotonic() + patience)
        with os.fdopen(fifo, "wb", buffering=0) as file:
            file.write(f"{word} {token} {os.getpid()}\n".encode())
        return _await_answer(events, place, token, time.monotonic() + seconds)
    except OSError as error:
        raise HostFault(f"{path}: {error.strerror}") from None
    finally:
        os.close(events)


def _open_fifo(path: Path, place: Place, events: int, until: float) -> int:
    """Open the FIFO once a watcher listens (fifo(7))."""
    found, told = os.pipe()

    def try_open() -> None:  # in a thread, because open(2) blocks until a watcher listens
        flags, number = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, -errno.ENOENT
        while number == -errno.ENOENT and time.monotonic() < until:
            try:
                number = os.open(path, flags)
            except OSError as error:
                number = -(error.errno or errno.EIO)
                time.sleep(_POLL)  # only root can watch the directory
        if number != -errno.ENOENT:
            os.write(told, b"%d" % number)

    threading.Thread(target=try_open, daemon=True).start()
    while (left := until - time.monotonic()) > 0:
        if found in wait_readable([found, events], left):
            number = int(os.read(found, 16))
            os.close(found)
            os.close(told)
            if number < 0:
                raise OSError(-number, os.strerror(-number))
            return number
        _take(events)
        if "ended" in place.facts():
            raise HostFault("the job has ended")
    raise HostFault(
        f"{path}: no watcher process of vTorque serves this job, or its guests are not ready "
        "yet. If the guests are ready, ask your administrator to run the same command, which "
        "starts the watcher"
    )


def _take(events: int) -> None:
    with suppress(BlockingIOError):
        os.read(events, 1 << 16)


def _await_answer(events: int, place: Place, token: str, until: float) -> str:
    ended = False
    while True:
        found = _read_answer(place, token)
        if found is not None:
            return found
        if not ended and "ended" in place.facts():
            ended, until = True, min(until, time.monotonic() + _LAST)
        left = until - time.monotonic()
        if left <= 0:
            raise HostFault(
                "the job has ended" if ended
                else "the node's watcher did not answer in time; vmgr logs may show the reason"
            )  # fmt: skip
        wait_readable([events], left)
        _take(events)


def _read_answer(place: Place, token: str) -> str | None:
    with suppress(OSError, ValueError, TypeError):
        found = json.loads(place.read(ANSWER, _MOST))
        if found["token"] == token:
            return str(found["said"])
    return None
