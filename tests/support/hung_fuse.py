"""Serve a user's disk from a FUSE file that stops answering; as root, in an own mount namespace.

Prints what the functions of the daemon return or raise. The argument says when the file stops
answering: ``start``, or ``run`` for the time after the daemon's start.
"""

import ctypes
import errno
import os
import shutil
import socket
import struct
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

from vtorque_core.api.children import run_in_child
from vtorque_core.base.errors import HostFault, Refused
from vtorque_core.resources import user_daemon, user_disk
from vtorque_own_images.own_disk import cached_status

UID = 2000
_LOOKUP, _GETATTR, _OPEN, _READ, _INIT = 1, 3, 14, 15, 26  # linux/fuse.h
_SIZE = 1 << 20
_CONNECTIONS = Path("/sys/fs/fuse/connections")


def _attributes(inode: int, mode: int, size: int) -> bytes:
    times = (0,) * 6
    return struct.pack("=QQQQQQIIIIIIIIII", inode, size, 8, *times, mode, 1, UID, UID, 0, 4096, 0)


def serve(device: int, hung: set[int], asked: threading.Event) -> None:
    """Answer all calls except those in ``hung``."""
    file = _attributes(2, 0o100600, _SIZE)
    while True:
        _, call, unique, inode = struct.unpack_from("=IIQQ", os.read(device, 1 << 20))
        data, error = b"", 0
        if call in hung:
            asked.set()
            continue
        if call == _INIT:
            data = struct.pack("=IIIIHHIIHHI", 7, 31, 65536, 0, 12, 10, 65536, 1, 1, 0, 0)
            data += bytes(24)
        elif call == _LOOKUP:
            data = struct.pack("=QQQQII", 2, 0, 0, 0, 0, 0) + file
        elif call == _GETATTR:
            data = struct.pack("=QII", 0, 0, 0)
            data += file if inode == 2 else _attributes(1, 0o40700, 0)
        elif call == _OPEN:
            data = struct.pack("=QII", 0, 0, 0)
        else:
            error = -errno.ENOSYS
        os.write(device, struct.pack("=IiQ", 16 + len(data), error, unique) + data)


def read_from(path: str) -> socket.socket:
    """Read from the disk that an NBD server exports, without waiting for the data."""
    client = socket.socket(socket.AF_UNIX)
    client.connect(path)
    client.sendall(struct.pack("!I8sII", 3, b"IHAVEOPT", 1, 0))
    client.sendall(struct.pack("!IHHQQI", 0x25609513, 0, 0, 1, 4096, 4096))
    return client


def say(line: str) -> None:
    os.write(1, f"{line}\n".encode())


def start(disk: user_disk.ServedDisk, seconds: float) -> None:
    try:
        disk.start(timeout=seconds)
        say("started")
    except (HostFault, Refused) as error:
        say(f"{type(error).__name__}: {error}")


def main() -> None:
    top = Path(tempfile.mkdtemp())  # pytest's directories are closed to the user
    top.chmod(0o711)
    (top / "m").mkdir()
    (top / "d").mkdir(mode=0o711)
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id={UID},group_id={UID},allow_other".encode()
    libc = ctypes.CDLL(None, use_errno=True)
    for kind, place, words in ((b"fuse", top / "m", options), (b"fusectl", _CONNECTIONS, None)):
        if libc.mount(b"x", bytes(place), kind, 6, words):
            raise OSError(ctypes.get_errno(), "mount")
    hung, asked = set[int](), threading.Event()
    threading.excepthook = lambda _: None  # the end of the file system
    threading.Thread(target=serve, args=(device, hung, asked), daemon=True).start()
    names = {name: str(top / "d" / name) for name in ("socket", "lock", "log")}
    disk = user_disk.ServedDisk(
        source=f"{top}/m/x.qcow2", uid=UID, gid=UID, groups=(UID,), socket_owner=UID, **names
    )
    if sys.argv[1] == "start":
        hung.add(_READ)
        start(disk, 3)
        start(replace(disk, users_fault=True, socket=f"{top}/d/s", lock=f"{top}/d/l"), 3)
    else:
        start(replace(disk, source=f"{top}/m/x.raw", readonly=True), 60)
        hung |= {_READ, _GETATTR}
        client = read_from(names["socket"])
        asked.wait()

        def check() -> None:
            os.close(device)  # otherwise this process would keep the file system alive
            found = user_disk.served_file(Path(names["lock"]), cached_status)
            assert found.st_size == _SIZE

        say(run_in_child(check, 30) or "has a size")
        client.close()
    try:
        user_daemon.stop(names["lock"], time.monotonic() + 20)
        say("stopped")
    finally:
        for connection in _CONNECTIONS.iterdir():
            if connection.stat().st_uid == UID:
                (connection / "abort").write_text("1")
        libc.umount2(bytes(top / "m"), 2)  # MNT_DETACH
        shutil.rmtree(top)
        os._exit(0)  # the thread never ends


if __name__ == "__main__":
    main()
