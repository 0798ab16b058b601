"""Resource: the process that boots guests at the request of the job shell.

The prologue forks the process and returns. Only the job's owner may connect to the process's
socket, and only once. The process then boots the guests, sends the descriptors of their consoles,
and ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from vtorque_core.api.acquired import unjournalled
from vtorque_core.api.daemon_process import DaemonProcess
from vtorque_core.api.guest_driver import MAX_ORDER, BootedGuest
from vtorque_core.base import locks
from vtorque_core.base.detach import run_detached
from vtorque_core.base.errors import HostFault, Refused, printable

_READ = 10.0  # seconds that an order may take to arrive
_PEER = struct.Struct("3i")  # struct ucred (unix(7), SO_PEERCRED): pid, uid, gid


@dataclass(frozen=True)
class BootStarter(DaemonProcess):
    kind = "starter"
    argv: tuple[str, ...] = ("the starter of late guests",)
    lock: str = ""
    socket: str = ""
    uid: int = unjournalled(-1)
    boot: Callable[[bytes], Sequence[BootedGuest]] = unjournalled()

    def create(self) -> None:
        def serve_locked(begun: Callable[[], None]) -> int:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            fcntl.lockf(os.open(self.lock, flags, 0o600), fcntl.LOCK_EX | fcntl.LOCK_NB)
            locks.close_inherited()  # the prologue's locks must end with it
            return self.serve(begun)

        run_detached(serve_locked)
        if not Path(self.socket).exists():
            raise HostFault(f"{self.argv[0]} does not listen on {self.socket}")

    def serve(self, begun: Callable[[], None]) -> int:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.socket)
            os.chown(self.socket, self.uid, os.getegid(), follow_symlinks=False)
            os.chmod(self.socket, 0o600)  # noqa: PTH101 - below a directory that only root writes
            listener.listen(1)
            begun()
            while True:
                connection, _ = listener.accept()
                with connection:
                    order = _read(connection, self.uid)
                    if order is not None:
                        _answer(connection, order, self.boot)
                        return 0


def _read(connection: socket.socket, uid: int) -> bytes | None:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    if _PEER.unpack(credentials)[1] != uid:
        return None
    connection.settimeout(_READ)
    order = b""
    with contextlib.suppress(OSError):
        while part := connection.recv(1 << 16):
            order += part
            if len(order) > MAX_ORDER:
                return None
        return order
    return None


def _answer(
    connection: socket.socket, order: bytes, boot: Callable[[bytes], Sequence[BootedGuest]]
) -> None:
    consoles: list[int] = []
    try:
        guests = boot(order)
        consoles = [each.console for each in guests]
        said = {"guests": [{"hostname": g.hostname, "rank": g.rank} for g in guests]}
        message = json.dumps(said)
    except Refused as error:
        message = json.dumps({"refused": printable(str(error), 2000)})
    except HostFault as error:
        detail = [printable(line) for line in error.detail]
        message = json.dumps({"fault": printable(str(error), 2000), "detail": detail})
    except Exception as error:  # a bug: the user must still get an answer
        what = f"{type(error).__name__}: {error}"
        message = json.dumps({"fault": printable(what, 2000)})
    with contextlib.suppress(OSError):  # the job has ended
        sent = socket.send_fds(connection, [message.encode()], consoles)
        connection.sendall(message.encode()[sent:])
