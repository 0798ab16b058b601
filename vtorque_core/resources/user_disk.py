"""Serve a user's own disk file, raw or qcow2, to a guest, as the user.

:mod:`vtorque_core.resources.user_daemon` runs qemu-storage-daemon (QEMU 7.2), which serves the file
over NBD; doc/design.md says why.

The daemon holds a lock on the whole file, also against ``qemu-img``. QEMU's own locks do not stop a
second writer, because they let other processes write to a disk that NBD exports.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from vtorque_core.base import safefs
from vtorque_core.base.errors import printable
from vtorque_core.base.locks import holder_of
from vtorque_core.resources import user_daemon

STORAGE_DAEMON = "/usr/bin/qemu-storage-daemon"

# The NBD protocol, "Newstyle negotiation" (https://github.com/NetworkBlockDevice/nbd,
# doc/proto.md): the server's greeting, and the client's abort.
_GREETING = b"NBDMAGIC" + b"IHAVEOPT"
_FAREWELL = struct.pack("!I8sII", 1, b"IHAVEOPT", 2, 0)  # NBD_FLAG_C_FIXED_NEWSTYLE, NBD_OPT_ABORT


@dataclass(frozen=True)
class ServedDisk(user_daemon.ServedData):
    """The daemon for one disk file of the job's owner.

    The format follows from the name (``.qcow2``, otherwise raw). Probing would be unsafe: a guest
    could write a qcow2 header into a raw disk.
    """

    program: str = STORAGE_DAEMON

    @property
    def disk(self) -> str:
        return "qcow2" if self.source.endswith(".qcow2") else "raw"

    @property
    def label(self) -> str:
        # Only an own image is read-only.
        return f"{'img' if self.readonly else 'disk'}={printable(self.source, 1000)}"

    def argv(self, socket_fd: int) -> tuple[str, ...]:
        """Return the daemon's arguments. A guest's discards make holes in the file."""
        access = ",read-only=on" if self.readonly else ",discard=unmap"
        writable = "off" if self.readonly else "on"
        file = "driver=file,node-name=file,filename=/proc/self/fd/{source},locking=off"
        disk = f"driver={self.disk},node-name=disk,file=file"
        return (
            self.program,
            *("--blockdev", f"{file},auto-read-only=off{access}"),
            *("--blockdev", f"{disk}{access}"),
            *("--nbd-server", f"addr.type=fd,addr.str={socket_fd}"),
            *("--export", f"type=nbd,id=disk,node-name=disk,name=,writable={writable}"),
        )

    def start(self, *, timeout: float = 10.0) -> None:
        """Start the daemon, which outlives QEMU. As root.

        Refuses a file that is missing, in use, of an invalid size, or not a regular file of the
        user.
        """
        with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as probe:
            probe.setblocking(False)
            user_daemon.start(self, lambda _log: _sends_greeting(probe, self.socket), timeout)


def _sends_greeting(probe: socket.socket, path: str) -> bool:
    with contextlib.suppress(OSError):  # from the second time on: it is connected
        probe.connect(path)
    try:
        greeting = probe.recv(len(_GREETING) + 2)  # and its flags
    except OSError:  # nothing yet
        return False
    if not greeting.startswith(_GREETING):
        return False
    probe.sendall(_FAREWELL)
    return True


@dataclass(frozen=True)
class UserDisk(user_daemon.UserDaemon):
    kind = "userdisk"


def served_file(lock: Path, status: Callable[[Path], os.stat_result] = Path.stat) -> os.stat_result:
    """Return the stat(2) result of the disk file that the holder of ``lock`` serves.

    Call this function in a child process, because a file system can hang. ``status`` is called
    with a link to the file below /proc.
    """
    with safefs.name_errors(f"cannot read the status of the file of {lock.stem}"):
        proc = Path(f"/proc/{holder_of(lock)}")
        source = re.search(rb"filename=/proc/self/fd/(\d+)", (proc / "cmdline").read_bytes())
        return status(proc / "fd" / (source[1].decode() if source else "none"))
