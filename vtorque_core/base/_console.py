"""Program that records a guest's console; :mod:`_launch` runs it with SOCKET FILE UID as ARGV.

QEMU, which runs as UID, connects to SOCKET first. The program enters QEMU's control groups, so that
a guest that floods its console is charged for the recording. One other client can read the
output and send input to the guest. The program ends when QEMU disconnects.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import time
from io import FileIO

LARGEST, DROPPED = 2 << 20, 1 << 20  # bytes of the file, and of its beginning if it is full
# QEMU sends single bytes; a socket holds about a hundred (net.core.wmem_default). With this
# pause in seconds after each read, a guest gets about 70 KB/s, and this program uses 5 % of a CPU.
# The boot is not delayed.
_PAUSE, _WITHOUT_PAUSE = 0.001, 256 << 10  # bytes
_READ = 1 << 16
_PEER = socket.SOL_SOCKET, socket.SO_PEERCRED, 4  # of struct ucred only the pid


def record(words: list[str], started: int) -> None:
    """Record the console as QEMU's user. Close the descriptor ``started`` when QEMU can connect."""
    path, log, uid = words
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    os.umask(0o077)
    file = open(log, "w+b", buffering=0)  # noqa: PTH123, SIM115 - pathlib takes 10 ms
    listener = socket.socket(socket.AF_UNIX)
    if os.path.exists(path):  # noqa: PTH110 - of an earlier recorder, before a cold boot
        os.unlink(path)  # noqa: PTH108
    listener.bind(path)
    if os.geteuid() == 0:
        os.chown(path, int(uid), -1)
    listener.listen(1)
    os.close(started)
    qemu = listener.accept()[0]
    # When QEMU ends, systemd sends SIGTERM to its group, but a slow client must get all output.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.geteuid() == 0:
        enter_groups(int.from_bytes(qemu.getsockopt(*_PEER), sys.byteorder))
        os.setgroups([])
        os.setgid(65534)  # nogroup
        os.setuid(int(uid))
    with contextlib.suppress(OSError):  # QEMU was killed
        _copy(qemu, listener, file)


def enter_groups(pid: int, proc: str = "/proc", groups: str = "/sys/fs/cgroup") -> None:
    """Enter the control groups (v1 and v2, cgroups(7)) of a process. Ignores errors."""
    with contextlib.suppress(OSError), open(f"{proc}/{pid}/cgroup", "rb") as lines:  # noqa: PTH123
        for line in lines:
            _, kind, path = os.fsdecode(line).rstrip("\n").split(":", 2)
            for top in (kind.removeprefix("name="),) if kind else (".", "unified"):
                name = f"{groups}/{top}{path}/cgroup.procs"
                with contextlib.suppress(OSError), open(name, "r+b", 0) as group:  # noqa: PTH123
                    group.write(b"0")  # the writing process


def _copy(qemu: socket.socket, listener: socket.socket, file: FileIO) -> None:
    client = None
    while True:
        ready = select.select([qemu, client or listener], [], [])[0]  # noqa: TID251 - few exist
        if listener in ready:
            client = listener.accept()[0]
        output = qemu.recv(_READ) if qemu in ready else b""
        if qemu in ready and not output:
            return
        _append(file, output)
        try:
            if client is not None:
                client.sendall(output)  # at the client's pace
            if client is not None and client in ready:
                data = client.recv(_READ)
                client = client if data else None
                qemu.send(data, socket.MSG_DONTWAIT)
        except OSError as error:
            # Input that the guest does not read is discarded, because its output must be read.
            client = client if isinstance(error, BlockingIOError) else None
        if file.tell() > _WITHOUT_PAUSE:
            time.sleep(_PAUSE)


def _append(file: FileIO, data: bytes) -> None:
    """Append to the log. If it becomes too large, first remove its oldest part.

    Changes the file in place, because a new file would lack the ACL entry for the job's owner.
    """
    with contextlib.suppress(OSError):  # a full disk must not stop the guest
        if file.tell() + len(data) > LARGEST:
            file.seek(DROPPED)
            kept = file.read()
            file.seek(0)
            file.write(kept)
            file.truncate()
        file.write(data)
