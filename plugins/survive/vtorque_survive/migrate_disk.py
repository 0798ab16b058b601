"""Send a guest's own disk to another node before the guest migrates. Runs as root, on both nodes.

The first pass sends the disk while the guest runs. The second pass sends the changes once the guest
is paused. Only then does libvirt migrate the guest, so that the destination's QEMU opens a complete
file. The guest stays paused until the source sends the resume message to the destination.

Protocol: the request of :mod:`vtorque_survive.arrival` is followed by parts: offset, length, data.
A part of length 0 marks the end of a pass and is answered by an empty line. After both passes, the
resume message follows.
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

from vtorque_core.api import HostFault, Paths, closing, name_errors, printable
from vtorque_core.live import libvirt
from vtorque_survive import domains, guest_migration, sparse

_PART = struct.Struct(">QQ")
_ALL, _GO_ON = b"\n", b"!"
_HERE = b'{"answer": "here"}\n'  # as for other requests
_BLOCK = 1 << 20  # bytes that are compared and sent together
_MOST = 1 << 44  # bytes; larger than any disk
_LINE = 1 << 16  # bytes of an answer
REST = 300.0
"""Seconds for the changes, which are sent while the guest is paused."""
_WAIT = 60.0  # seconds for each part to be accepted, and for an answer
_POLL = 0.5  # seconds


@contextmanager
def send_disk(
    argv: list[str],
    question: dict[str, str],
    disk: Path | None,
    stand_still: Callable[[], None],
    stop: Callable[[], bool],
) -> Iterator[Callable[[], None]]:
    """Send ``disk``, if any. Yield a function that pauses the guest and sends the changes.

    When the context ends without an error, the destination resumes the guest. If ``disk`` is None,
    nothing is sent, and the function does nothing.

    Args:
        argv: Command that runs the receiver on the destination.
        question: The request to the receiver.
        disk: The disk file.
        stand_still: Pauses the guest.
        stop: Returns whether to stop sending.
    """
    if disk is None:
        yield lambda: None
        return
    had: dict[int, bytes] = {}
    first = [json.dumps(question).encode() + b"\n"]
    with (
        _open_disk(disk, os.O_RDONLY) as file,
        tempfile.TemporaryFile() as errors,
        _start_receiver(argv, errors) as there,
    ):
        assert there.stdin is not None  # noqa: S101

        def send_rest() -> None:
            stand_still()
            until = time.monotonic() + REST
            parts = _missing_parts(file, had)
            _require(
                _ALL, _exchange(there, parts, lambda: stop() or time.monotonic() >= until), errors
            )

        try:
            parts = itertools.chain(first, _missing_parts(file, had))
            _require(_ALL, _exchange(there, parts, stop), errors)
            yield send_rest
            _require(_HERE, _exchange(there, [_GO_ON], lambda: False), errors)
        finally:
            _end(there)
            with suppress(BrokenPipeError):
                there.stdin.close()


def _start_receiver(argv: list[str], errors: IO[bytes]) -> subprocess.Popen[bytes]:
    with name_errors(argv[0]):
        return subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
            start_new_session=True,
        )  # fmt: skip


def _end(there: subprocess.Popen[bytes]) -> None:
    """Kill the process and its children, such as an ssh that the process started."""
    with suppress(ProcessLookupError):
        os.killpg(there.pid, signal.SIGKILL)


def _exchange(
    there: subprocess.Popen[bytes], what: Iterable[bytes], stop: Callable[[], bool]
) -> bytes:
    """Send data; return the answer, or b"" if there is no answer in time."""
    assert there.stdin is not None and there.stdout is not None  # noqa: S101
    answered, at = threading.Event(), time.monotonic()

    def watch_answer() -> None:
        while not answered.wait(_POLL):
            if stop() or time.monotonic() >= at + _WAIT:
                _end(there)

    thread = threading.Thread(target=watch_answer)
    thread.start()
    try:
        with suppress(BrokenPipeError):  # its answer has the reason
            for each in what:
                there.stdin.write(each)
                at = time.monotonic()
            there.stdin.flush()
        return there.stdout.readline(_LINE)
    finally:
        answered.set()
        thread.join()


def _missing_parts(file: int, had: dict[int, bytes]) -> Iterator[bytes]:
    """Yield the parts of a disk that were never sent, or have changed since.

    ``had`` maps the offset of each sent part to the part's digest.
    """
    stretches = (range(at - at % _BLOCK, end, _BLOCK) for at, end in sparse.data(file))
    for at in sorted({*itertools.chain.from_iterable(stretches), *had}):
        data = os.pread(file, _BLOCK, at)
        yield b""  # reading unchanged data takes time, too
        digest = hashlib.blake2b(data).digest()
        if data and had.get(at) != digest:
            had[at] = digest
            yield _PART.pack(at, len(data))
            yield data
    size = os.fstat(file).st_size
    had.update(dict.fromkeys((at for at in had if at + _BLOCK > size), b""))  # truncated
    yield _PART.pack(size, 0)


def _require(wanted: bytes, said: bytes, errors: IO[bytes]) -> None:
    if said != wanted:
        errors.seek(0)
        why = errors.read(_LINE).strip() or said.strip() or b"no answer in time"
        last = why.splitlines()[-1].decode("utf-8", "replace")
        raise HostFault(f"cannot copy the guest's disk: {printable(last, 300)}")


def receive(
    paths: Paths, uri: str, key: str, uuid: str, awaited: Callable[[], bool], parts: IO[bytes],
    said: IO[bytes],
) -> str:  # fmt: skip
    """Write the disk of an arriving guest, then resume the guest.

    The protocol is described at the top of this module.

    Args:
        paths: The node's paths.
        uri: libvirt's URI.
        key: The key of the job attempt.
        uuid: The guest.
        awaited: Returns whether this node still waits for the guest.
        parts: The stream with the disk's parts, in two passes, and then the resume message.
        said: The stream for the answer at the end of each pass, an empty line.

    Raises:
        HostFault: If the disk is incomplete or the guest is not expected.
    """
    disk = guest_migration.disks(paths, key).get(uuid)
    if disk is None or not awaited() or domains.domain_state(uri, uuid):
        raise HostFault("no guest on this node waits for this disk")
    with _open_disk(disk, os.O_RDWR) as file:
        for _ in range(2):
            _read(parts, file)
            said.write(_ALL)
            said.flush()
    if _read_exactly(parts, 1) != _GO_ON or not awaited():
        raise HostFault("the migration was canceled: the guest is not resumed")
    libvirt.resume_domain(uri, uuid)
    return "here"


def _read(parts: IO[bytes], file: int) -> None:
    while True:
        at, count = _PART.unpack(_read_exactly(parts, _PART.size))
        if at > _MOST or count > _BLOCK:
            raise HostFault("received invalid data instead of a disk")
        if not count:
            os.ftruncate(file, at)
            return
        data = memoryview(_read_exactly(parts, count))
        while data:
            written = os.pwrite(file, data, at)
            at, data = at + written, data[written:]


def _read_exactly(parts: IO[bytes], count: int) -> bytes:
    data = parts.read(count)
    if len(data) < count:
        raise HostFault("the sender disconnected before the disk was complete")
    return data


@contextmanager
def _open_disk(disk: Path, how: int) -> Iterator[int]:
    try:
        with closing(os.open(disk, how | os.O_NOFOLLOW | os.O_CLOEXEC)) as file:
            yield file
    except BrokenPipeError:
        raise
    except OSError as error:
        raise HostFault(f"{disk}: {error.strerror}") from None
