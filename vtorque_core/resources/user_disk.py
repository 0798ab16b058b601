"""Serve a user's own disk file, raw or qcow2, to a guest, as the user.

The daemon is Debian's qemu-storage-daemon (QEMU 7.2). It runs as the job's user without any
capability, in a user namespace without a root and without a network; how the process gets there
and how the file is opened: :mod:`vtorque_core.resources._user_daemon_exec`; how it is found again
and ended: :mod:`vtorque_core.resources.user_daemon`.

It speaks NBD, not vhost-user-blk: libvirt 9.0 takes neither ``<serial>`` (a guest finds its disk
by it) nor ``discard`` nor ``readonly`` for a vhostuser disk, and a daemon of the user's would have
all memory of the guest mapped. libvirt is given the socket: ``<disk type='network'><source
protocol='nbd'><host transport='unix' socket=PATH/>`` (https://libvirt.org/formatdomain.html).

Two guests must not write one file. QEMU's own locks do not see to that, since an NBD export shares
the right to write: two daemons with ``locking=on`` serve the same file (tried). So the file is
locked whole before the daemon starts, which also keeps QEMU's other tools away (``qemu-img``).
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import struct
from dataclasses import dataclass
from pathlib import Path

from vtorque_core.base import safefs
from vtorque_core.base.errors import printable
from vtorque_core.base.locks import holder_of
from vtorque_core.resources import user_daemon

STORAGE_DAEMON = "/usr/bin/qemu-storage-daemon"

# The NBD protocol, "Newstyle negotiation" (https://github.com/NetworkBlockDevice/nbd,
# doc/proto.md): what a server says first, and a client that leaves without having been one.
_GREETING = b"NBDMAGIC" + b"IHAVEOPT"
_FAREWELL = struct.pack("!I8sII", 1, b"IHAVEOPT", 2, 0)  # NBD_FLAG_C_FIXED_NEWSTYLE, NBD_OPT_ABORT


@dataclass(frozen=True)
class DiskFile(user_daemon.Service):
    """A disk file of the job's user and its daemon; ``source`` is the file.

    It is a qcow2 if its name ends in ``.qcow2``, else raw: a guest that writes a qcow2's header
    into a raw disk must not make QEMU take it for one.
    """

    program: str = STORAGE_DAEMON

    @property
    def disk(self) -> str:
        """The format."""
        return "qcow2" if self.source.endswith(".qcow2") else "raw"

    @property
    def label(self) -> str:
        """What begins the messages about the file."""
        return f"disk={printable(self.source, 1000)}"

    def argv(self, socket_fd: int) -> tuple[str, ...]:
        """Return the daemon's arguments; ``{source}`` stands for the file's descriptor.

        No path is in here, so none needs quoting, and the format is said: never probed. The export
        has no name, as qemu-nbd's. Discarding makes holes in the file, as a guest's fstrim expects.
        """
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
        """Start the daemon, detached; return when it serves on ``socket``.

        As root; see :func:`vtorque_core.resources.user_daemon.start`. It goes on when QEMU goes,
        until it is stopped. Raises Refused: the file is missing, is not a regular file of the
        user's, has no size that a disk can have, or is in use. Raises HostFault for the rest.
        """
        with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as probe:
            probe.setblocking(False)
            user_daemon.start(self, lambda _log: _greeted(probe, self.socket), timeout)


def _greeted(probe: socket.socket, path: str) -> bool:
    """Return whether the server has greeted the probe, and say good-bye to it."""
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
    """The daemon of a user's :class:`DiskFile`."""

    kind = "userdisk"


def served(lock: Path) -> os.stat_result:
    """Return what stat(2) says of the file that the daemon of this lock has open. As root.

    No path of the user's is looked up. Raises HostFault: the daemon has ended, or the file system
    lets root not look (FUSE). One that hangs is waited for: call it in a child.
    """
    with safefs.naming(f"cannot look at the file of {lock.stem}"):
        proc = Path(f"/proc/{holder_of(lock)}")
        source = re.search(rb"filename=/proc/self/fd/(\d+)", (proc / "cmdline").read_bytes())
        return (proc / "fd" / (source[1].decode() if source else "none")).stat()
