"""Serve a user's disk from a FUSE file that never answers; as root, in an own mount namespace.

Prints what the start and the stop of the daemon raise.
"""

import ctypes
import os
import shutil
import struct
import tempfile
import threading
import time
from pathlib import Path

from vtorque_core.base.errors import HostFault
from vtorque_core.resources import user_daemon, user_disk

UID = 2000
_LOOKUP, _GETATTR, _OPEN, _INIT = 1, 3, 14, 26  # linux/fuse.h


def _attributes(inode: int, mode: int, size: int) -> bytes:
    times = (0,) * 6
    return struct.pack("=QQQQQQIIIIIIIIII", inode, size, 8, *times, mode, 1, UID, UID, 0, 4096, 0)


def serve(device: int) -> None:
    """Answer everything but reads."""
    file = _attributes(2, 0o100600, 1 << 20)
    while True:
        _, call, unique, inode = struct.unpack_from("=IIQQ", os.read(device, 1 << 20))
        if call == _INIT:
            data = struct.pack("=IIIIHHIIHHI", 7, 31, 65536, 0, 12, 10, 65536, 1, 1, 0, 0)
            data += bytes(24)
        elif call == _LOOKUP:
            data = struct.pack("=QQQQII", 2, 0, 60, 60, 0, 0) + file
        elif call == _GETATTR:
            data = struct.pack("=QII", 60, 0, 0)
            data += file if inode == 2 else _attributes(1, 0o40700, 0)
        elif call == _OPEN:
            data = struct.pack("=QII", 0, 0, 0)
        else:
            continue
        os.write(device, struct.pack("=IiQ", 16 + len(data), 0, unique) + data)


def main() -> None:
    top = Path(tempfile.mkdtemp())  # pytest's directories are closed to the user
    top.chmod(0o711)
    (top / "m").mkdir()
    (top / "d").mkdir(mode=0o711)
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id={UID},group_id={UID}".encode()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"x", bytes(top / "m"), b"fuse", 6, options):
        raise OSError(ctypes.get_errno(), "mount")
    threading.Thread(target=serve, args=(device,), daemon=True).start()
    names = {name: str(top / "d" / name) for name in ("socket", "lock", "log")}
    disk = user_disk.ServedDisk(
        source=f"{top}/m/x.qcow2", uid=UID, gid=UID, groups=(UID,), socket_owner=UID, **names
    )
    try:
        disk.start(timeout=3)
    except HostFault as error:
        os.write(1, f"{error}\n".encode())
    user_daemon.stop(names["lock"], time.monotonic() + 60)
    libc.umount2(bytes(top / "m"), 2)  # MNT_DETACH
    shutil.rmtree(top)
    os.write(1, b"stopped\n")
    os._exit(0)  # the thread never ends


if __name__ == "__main__":
    main()
