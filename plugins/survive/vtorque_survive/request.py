"""How a job's owner asks root's watcher, and what it answers.

They write a line to a FIFO (fifo(7)) in the job's directory of root's, which they alone may write
to: no descriptor can come through it, and root waits for nobody. The answer is a file of root's
among what is kept of the job.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import select
import stat
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from vtorque_core.api import HostFault, Paths
from vtorque_core.api.acquired import Resource
from vtorque_core.api.kept_records import Place
from vtorque_core.live import changes

SUSPEND, RESUME, CHECKPOINT, SAVE = "suspend", "resume", "checkpoint", "save"  # the job goes on
ANSWER = "suspend.json"
_LINE = re.compile(rb"(suspend|resume|checkpoint|save) ([0-9a-f]{16}) ([0-9]{1,9})\n")
_MOST = 4096  # bytes that are read at a time; what else there is is lost
_LAST = 5.0  # seconds for the answer once the job has ended
_BEGINS = 60.0  # seconds until a watcher listens to a job that begins, or was started for it
_LOOK = 0.05  # seconds between two looks for the FIFO of a job that begins


def path_of(paths: Paths, key: str) -> Path:
    """Return the FIFO of a job attempt on this node."""
    return paths.job_run(key) / "suspend.fifo"


@dataclass(frozen=True)
class Fifo(Resource):
    """The FIFO of a job, in its directory of root's; ``uid`` may write to it, and nobody else."""

    kind = "survive-fifo"
    path: str
    uid: int

    def create(self) -> None:
        """Make it. Raises HostFault."""
        try:
            os.mkfifo(self.path, 0o200)
            os.chown(self.path, self.uid, -1, follow_symlinks=False)
        except OSError as error:
            raise HostFault(f"cannot make {self.path}: {error.strerror}") from None

    def release(self) -> None:
        """Remove it; missing is fine."""
        try:
            Path(self.path).unlink(missing_ok=True)
        except OSError as error:
            raise HostFault(f"cannot remove {self.path}: {error.strerror}") from None


def listen(path: Path) -> int:
    """Return a descriptor of the FIFO at this path in a directory of root's. Raises OSError.

    It is open for writing, too, so that it has no end.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    if not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is no FIFO")
    return descriptor


def taken(descriptor: int) -> tuple[str, str, int] | None:
    """Return the last word that was asked, its token and the pid that who has asked says is theirs.

    None: there is none. Never waits.
    """
    try:
        said = os.read(descriptor, _MOST)
    except OSError:
        return None
    found = _LINE.fullmatch(said[said.rfind(b"\n", 0, -1) + 1 :])
    return (found[1].decode(), found[2].decode(), int(found[3])) if found else None


def answer(place: Place, token: str, text: str, made: str = "") -> None:
    """Tell who has asked, if it can be kept; ``made``: a checkpoint's id."""
    with suppress(OSError, HostFault):
        place.write(ANSWER, json.dumps({"token": token, "said": text, "made": made}).encode())


def made(place: Place) -> str:
    """Return the id of the checkpoint that the last answer was about. Raises HostFault."""
    try:
        return str(json.loads(place.read(ANSWER, _MOST))["made"])
    except (OSError, ValueError, TypeError, KeyError):
        raise HostFault("it is saved, and its id is lost: vmgr checkpoints lists it") from None


def ask(path: Path, place: Place, word: str, seconds: float, patience: float = _BEGINS) -> str:
    """Return what the watcher says to it; empty: done. As the job's owner, or root.

    Waits ``seconds`` for the answer, and ``patience`` for a watcher that listens, which one does
    once the job's guests are ready. Raises HostFault: nobody is there, the job has ended, or it is
    not answered in time.
    """
    token = secrets.token_hex(8)
    events = changes.events()
    try:
        changes.watch(events, place.directory, content=False)
        fifo = _opened(path, place, events, time.monotonic() + patience)
        with os.fdopen(fifo, "wb", buffering=0) as file:
            file.write(f"{word} {token} {os.getpid()}\n".encode())
        return _awaited(events, place, token, time.monotonic() + seconds)
    except OSError as error:
        raise HostFault(f"{path}: {error.strerror}") from None
    finally:
        os.close(events)


def _opened(path: Path, place: Place, events: int, until: float) -> int:
    """Return a descriptor of the FIFO, once somebody listens (fifo(7)). Raises HostFault."""
    found, told = os.pipe()

    def opens() -> None:  # in a thread: open(2) waits for who listens, and for nothing else
        flags, number = os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, -errno.ENOENT
        while number == -errno.ENOENT and time.monotonic() < until:
            try:
                number = os.open(path, flags)
            except OSError as error:
                number = -(error.errno or errno.EIO)
                time.sleep(_LOOK)  # nobody but root sees it come
        if number != -errno.ENOENT:
            os.write(told, b"%d" % number)

    threading.Thread(target=opens, daemon=True).start()
    while (left := until - time.monotonic()) > 0:
        ready, _, _ = select.select([found, events], [], [], left)
        if found in ready:
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
        f"{path}: no process of vTorque's looks after the job, or its guests are not ready yet. If "
        "they are, ask your administrator to call the same command, which begins one"
    )


def _take(events: int) -> None:
    with suppress(BlockingIOError):
        os.read(events, 1 << 16)


def _awaited(events: int, place: Place, token: str, until: float) -> str:
    ended = False
    while True:
        found = _said(place, token)
        if found is not None:
            return found
        if not ended and "ended" in place.facts():
            ended, until = True, min(until, time.monotonic() + _LAST)
        left = until - time.monotonic()
        if left <= 0:
            raise HostFault(
                "the job has ended" if ended
                else "the node's watcher has not answered; vmgr logs may say more"
            )  # fmt: skip
        select.select([events], [], [], left)
        _take(events)


def _said(place: Place, token: str) -> str | None:
    with suppress(OSError, ValueError, TypeError):
        found = json.loads(place.read(ANSWER, _MOST))
        if found["token"] == token:
            return str(found["said"])
    return None
