"""A file system of a hostile user: one file, and requests on it that are never answered.

It uses the kernel's protocol (linux/fuse.h, version 7.31) in a separate process; when that ends,
the kernel answers all pending requests.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import multiprocessing
import os
import signal
import stat
import struct
import subprocess
from collections.abc import Collection, Iterator
from pathlib import Path

_IN = struct.Struct("=IIQQIIIHH")  # fuse_in_header
_OUT = struct.Struct("=IiQ")  # fuse_out_header
LOOKUP, FORGET, GETATTR, OPEN, READ, RELEASE, FLUSH, INIT, BATCH_FORGET = (
    1,
    2,
    3,
    14,
    15,
    18,
    25,
    26,
    42,
)
_SIZE = 1 << 20
_MAX = 1 << 18


def _attr(node: int) -> bytes:
    mode = stat.S_IFDIR | 0o755 if node == 1 else stat.S_IFREG | 0o666
    return struct.pack("=QQQQQQIIIIIIIIII", node, _SIZE, 8, *[0] * 6, mode, 1, 0, 0, 0, 4096, 0)


def _answer(opcode: int, node: int) -> bytes | None:
    if opcode == INIT:
        return struct.pack("=IIIIHHIIHHI28x", 7, 31, 0, 0, 8, 8, 65536, 1, 1, 0, 0)
    if opcode == LOOKUP:
        return struct.pack("=QQQQII", 2, 0, 9999, 9999, 0, 0) + _attr(2)
    if opcode == GETATTR:
        return struct.pack("=QII", 9999, 0, 0) + _attr(node)
    if opcode == OPEN:
        return struct.pack("=QII", 1, 0, 0)
    return b"" if opcode in (RELEASE, FLUSH) else None


def _serve(device: int, silent: Collection[int], fails_once: Collection[int]) -> None:
    failed = set()
    while True:
        try:
            request = os.read(device, _MAX)
        except OSError as error:
            if error.errno == errno.ENODEV:  # it has been unmounted
                return
            continue
        _, opcode, unique, node, *_ = _IN.unpack_from(request)
        if opcode in (FORGET, BATCH_FORGET):
            continue
        answer, code = _answer(opcode, node), 0
        if opcode in fails_once and opcode not in failed:
            failed.add(opcode)
            answer, code = b"", -errno.EIO
        elif opcode in silent:
            continue
        if answer is None:
            answer, code = b"", -errno.ENOSYS
        with contextlib.suppress(OSError):
            os.write(device, _OUT.pack(_OUT.size + len(answer), code, unique) + answer)


@contextlib.contextmanager
def mounted(at: Path, silent: Collection[int], fails_once: Collection[int] = ()) -> Iterator[Path]:
    """Mount it and yield its file. ``fails_once``: the first request fails with EIO. As root."""
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
    libc = ctypes.CDLL(None, use_errno=True)
    at.mkdir()
    if libc.mount(b"hostile", os.fsencode(at), b"fuse", 0, options) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(at))
    server = multiprocessing.get_context("fork").Process(
        target=_serve, args=(device, silent, fails_once), daemon=True
    )
    server.start()
    os.close(device)
    try:
        yield at / "file"
    finally:
        assert server.pid is not None
        os.kill(server.pid, signal.SIGKILL)  # which answers all
        server.join()
        subprocess.run(["umount", "-l", at], check=True)
