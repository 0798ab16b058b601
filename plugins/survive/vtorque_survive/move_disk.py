"""A guest's own disk goes before it to another node. As root, on both.

What it has written so far is sent while it runs, what it has written meanwhile when it stands
still. Only then libvirt has QEMU there open the file, and moves the guest, which it leaves standing
still as it was. That it goes on there is the last word on the same connection.

After the question of :mod:`vtorque_survive.arrival` come parts: where, how many bytes, and these.
The one without bytes is the last, where it is the disk's end: it is answered by an empty line. All
that twice, then the word.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import signal
import struct
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from vtorque_core.api import HostFault, Paths, printable
from vtorque_core.live import moving
from vtorque_survive import sparse

_PART = struct.Struct(">QQ")
_ALL, _GO_ON = b"\n", b"!"
_HERE = b'{"answer": "here"}\n'  # as of any question
_BLOCK = 1 << 20  # bytes that are sent again if one of them has changed
_MOST = 1 << 44  # bytes: where no disk ends
_LINE = 1 << 16  # bytes of an answer
REST = 300.0
"""Seconds for what has changed, while the guest stands still."""
_WAIT = 60.0  # seconds for some of it to be taken there, and for an answer
_LOOK = 0.5  # seconds


@contextmanager
def sent(
    argv: list[str],
    question: dict[str, str],
    disk: Path | None,
    stand_still: Callable[[], None],
    stop: Callable[[], bool],
) -> Iterator[Callable[[], None]]:
    """Send a disk, if there is one; when what is done then is done the guest goes on there.

    Gives what has the guest stand still (``stand_still``), and sends the rest. ``argv``: what is
    asked ``question`` there. ``stop``: whether to send no further. Raises HostFault.
    """
    if disk is None:
        yield lambda: None
        return
    had: dict[int, bytes] = {}
    first = [json.dumps(question).encode() + b"\n"]
    with (
        _opened(disk, os.O_RDONLY) as file,
        tempfile.TemporaryFile() as errors,
        _asked(argv, errors) as there,
    ):
        assert there.stdin is not None  # noqa: S101

        def rest() -> None:
            stand_still()
            until = time.monotonic() + REST
            parts = _changed(file, had)
            _require(_ALL, _said(there, parts, lambda: stop() or time.monotonic() >= until), errors)

        try:
            parts = itertools.chain(first, _changed(file, had))
            _require(_ALL, _said(there, parts, stop), errors)
            yield rest
            _require(_HERE, _said(there, [_GO_ON], lambda: False), errors)
        finally:
            _end(there)
            with suppress(BrokenPipeError):
                there.stdin.close()


def _asked(argv: list[str], errors: IO[bytes]) -> subprocess.Popen[bytes]:
    try:
        return subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
            start_new_session=True,
        )  # fmt: skip
    except OSError as error:
        raise HostFault(f"{argv[0]}: {error.strerror}") from None


def _end(there: subprocess.Popen[bytes]) -> None:
    """End what was asked, and what that has started: ``reach`` may be a script."""
    with suppress(ProcessLookupError):
        os.killpg(there.pid, signal.SIGKILL)


def _said(there: subprocess.Popen[bytes], what: Iterable[bytes], stop: Callable[[], bool]) -> bytes:
    """Say something there; return the answer; empty: there is none, or not in time."""
    assert there.stdin is not None and there.stdout is not None  # noqa: S101
    answered, at = threading.Event(), time.monotonic()

    def look() -> None:
        while not answered.wait(_LOOK):
            if stop() or time.monotonic() >= at + _WAIT:
                _end(there)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        with suppress(BrokenPipeError):  # it has said why
            for each in what:
                there.stdin.write(each)
                at = time.monotonic()
            there.stdin.flush()
        return there.stdout.readline(_LINE)
    finally:
        answered.set()
        thread.join()


def _changed(file: int, had: dict[int, bytes]) -> Iterator[bytes]:
    """Yield the parts that are not there yet; ``had``: what is, a digest by where it begins."""
    stretches = (range(at - at % _BLOCK, end, _BLOCK) for at, end in sparse.data(file))
    for at in sorted({*itertools.chain.from_iterable(stretches), *had}):
        data = os.pread(file, _BLOCK, at)
        yield b""  # also what is there already takes time
        digest = hashlib.blake2b(data).digest()
        if data and had.get(at) != digest:
            had[at] = digest
            yield _PART.pack(at, len(data))
            yield data
    size = os.fstat(file).st_size
    had.update(dict.fromkeys((at for at in had if at + _BLOCK > size), b""))  # it is cut there
    yield _PART.pack(size, 0)


def _require(wanted: bytes, said: bytes, errors: IO[bytes]) -> None:
    """Raise HostFault if it is not said."""
    if said != wanted:
        errors.seek(0)
        why = errors.read(_LINE).strip() or said.strip() or b"no answer in time"
        last = why.splitlines()[-1].decode("utf-8", "replace")
        raise HostFault(f"its disk does not go: {printable(last, 300)}")


def receive(
    paths: Paths, uri: str, key: str, uuid: str, awaited: Callable[[], bool], parts: IO[bytes],
    said: IO[bytes],
) -> str:  # fmt: skip
    """Write the disk of a guest that comes, then have it go on. Return that it is here.

    ``awaited``: whether it still is; ``said``: where is written each time that all is there. Raises
    HostFault: not all has come.
    """
    disk = moving.disks(paths, key).get(uuid)
    if disk is None or not awaited() or moving.state(uri, uuid):
        raise HostFault("no guest awaits its disk here")
    with _opened(disk, os.O_RDWR) as file:
        for _ in range(2):
            _read(parts, file)
            said.write(_ALL)
            said.flush()
    if _exactly(parts, 1) != _GO_ON or not awaited():
        raise HostFault("it is not to go on")
    moving.go_on(uri, uuid)
    return "here"


def _read(parts: IO[bytes], file: int) -> None:
    while True:
        at, count = _PART.unpack(_exactly(parts, _PART.size))
        if at > _MOST or count > _BLOCK:
            raise HostFault("what comes is no disk")
        if not count:
            os.ftruncate(file, at)
            return
        data = memoryview(_exactly(parts, count))
        while data:
            written = os.pwrite(file, data, at)
            at, data = at + written, data[written:]


def _exactly(parts: IO[bytes], count: int) -> bytes:
    data = parts.read(count)
    if len(data) < count:
        raise HostFault("who sends it has ended")
    return data


@contextmanager
def _opened(disk: Path, how: int) -> Iterator[int]:
    try:
        file = os.open(disk, how | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            yield file
        finally:
            os.close(file)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise HostFault(f"{disk}: {error.strerror}") from None
