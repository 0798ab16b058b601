"""A FUSE file system with one file, whose close(2) never ends; then a job while ``local`` has it.

A program, since its mount is for itself alone: python hanging_fuse.py DIRECTORY SUPPORT. It prints
``flush`` when somebody closes the file, and how the job ended: as root, with /dev/fuse.
"""

import contextlib
import ctypes
import os
import signal
import socket
import struct
import sys
import time
from pathlib import Path

_CLONE_NEWNS, _MS_REC, _MS_PRIVATE = 0x00020000, 0x4000, 1 << 18
# The kernel's side is linux/fuse.h: opcode, what is answered. FLUSH is 25.
LOOKUP, FORGET, GETATTR, OPEN, RELEASE, FLUSH, INIT, INTERRUPT = 1, 2, 3, 14, 18, 25, 26, 36


def attributes(inode: int, mode: int) -> bytes:
    """Return struct fuse_attr."""
    return struct.pack("6Q10I", inode, *(0,) * 5, *(0,) * 3, mode, 1, 0, 0, 0, 512, 0)


def serve(device: int) -> None:
    """Answer all but FLUSH."""
    while True:
        try:
            request = os.read(device, 1 << 17)
        except OSError:
            return
        _, code, unique, node = struct.unpack_from("IIQQ", request)
        file, top = attributes(2, 0o100644), attributes(1, 0o40755)
        answers = {
            INIT: struct.pack("4I2H2I2H8I", 7, 31, 1 << 16, 0, 12, 10, 1 << 16, 1, 0, 0, *(0,) * 8),
            LOOKUP: struct.pack("4Q2I", 2, 0, 1000, 1000, 0, 0) + file,
            GETATTR: struct.pack("Q2I", 1000, 0, 0) + (top if node == 1 else file),
            OPEN: struct.pack("Q2I", 1, 0, 0),
            RELEASE: b"",
        }
        if code == FLUSH:
            sys.stdout.write("flush\n")
            sys.stdout.flush()
        elif code in answers:
            answer = answers[code]
            os.write(device, struct.pack("IiQ", 16 + len(answer), 0, unique) + answer)
        elif code not in (FORGET, INTERRUPT):
            os.write(device, struct.pack("IiQ", 16, -38, unique))  # ENOSYS


def mounted(directory: Path) -> int:
    """Mount it where only this process sees it; return the pid of what serves it."""
    libc = ctypes.CDLL(None, use_errno=True)
    device = os.open("/dev/fuse", os.O_RDWR)
    options = f"fd={device},rootmode=40000,user_id=0,group_id=0".encode()
    for done in (
        libc.unshare(_CLONE_NEWNS),
        libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None),
        libc.mount(b"test", os.fsencode(directory), b"fuse", 0, options),
    ):
        if done != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    pid = os.fork()
    if pid == 0:
        serve(device)
        os._exit(0)
    os.close(device)
    return pid


def main() -> None:
    """Send the file to the service, and have it run a job of another client's."""
    from local_site import fresh_site  # where the other arguments say

    server = mounted(Path(sys.argv[1]))
    with fresh_site() as site, socket.socket(socket.AF_UNIX) as client:
        client.connect(str(site.paths.run / "local.sock"))
        file = os.open(f"{sys.argv[1]}/file", os.O_RDONLY)
        socket.send_fds(client, [b"{"], [file])
        time.sleep(1.0)  # until it has the file
        signal.signal(signal.SIGALRM, lambda *_: os.kill(server, signal.SIGKILL))
        signal.alarm(40)  # then the file system answers no more, and all ends
        code = site.submit("-W", "block=true", site.script("#!/bin/sh\nexit 3\n"))
        left = signal.alarm(0)
        sys.stdout.write(f"{'in time' if left else 'too late'} {code}\n")
        sys.stdout.flush()
        os.kill(server, signal.SIGKILL)
        os.waitpid(server, 0)
        with contextlib.suppress(OSError):  # nobody answers
            os.close(file)


if __name__ == "__main__":
    sys.path[:0] = sys.argv[2:]
    main()
