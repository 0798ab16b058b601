"""Guests that boot when the job shell says what they shall run: root's side of one order.

The prologue leaves a process (the kind ``starter``) that listens on the order's socket in the
first guest's run directory. The job's user alone may connect, once. The guests are then booted
under the job's lock, as the prologue would have done it, and the answer carries their consoles.
The process ends after its answer, or with the job: the teardown ends it as any daemon.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from vtorque_core import locks
from vtorque_core.api_guest import MAX_ORDER, BootedGuest
from vtorque_core.errors import HostFault, Refused, printable

_READ = 10.0  # seconds that an order may take to arrive
_PEER = struct.Struct("3i")  # struct ucred (unix(7), SO_PEERCRED): pid, uid, gid


@dataclass(frozen=True)
class Waiting:
    """What is waited for: the job's user's word on ``path``, then ``boot`` with it."""

    path: Path
    uid: int
    boot: Callable[[bytes], Sequence[BootedGuest]]

    def work(self, begun: Callable[[], None]) -> int:
        """Wait for the order, boot, answer; return 0. In a process of its own, as root."""
        locks.forget()  # the prologue's, which must end with it
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(self.path))
            os.chown(self.path, self.uid, 0, follow_symlinks=False)
            os.chmod(self.path, 0o600)  # noqa: PTH101 - below a directory that only root writes
            listener.listen(1)
            begun()
            while True:
                connection, _ = listener.accept()
                with connection:
                    order = self._read(connection)
                    if order is not None:
                        self._answer(connection, order)
                        return 0

    def _read(self, connection: socket.socket) -> bytes | None:
        """Return a whole order; None from anybody else, too long, too slow, or broken off."""
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
        if _PEER.unpack(credentials)[1] != self.uid:
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

    def _answer(self, connection: socket.socket, order: bytes) -> None:
        consoles: list[int] = []
        try:
            guests = self.boot(order)
            consoles = [each.console for each in guests]
            said = {"guests": [{"hostname": g.hostname, "rank": g.rank} for g in guests]}
            message = json.dumps(said)
        except Refused as error:
            message = json.dumps({"refused": printable(str(error), 2000)})
        except HostFault as error:
            detail = [printable(line) for line in error.detail]
            message = json.dumps({"fault": printable(str(error), 2000), "detail": detail})
        except Exception as error:  # a defect: the user shall not wait for an answer
            what = f"{type(error).__name__}: {error}"
            message = json.dumps({"fault": printable(what, 2000)})
        with contextlib.suppress(OSError):  # the job has been ended meanwhile
            sent = socket.send_fds(connection, [message.encode()], consoles)
            connection.sendall(message.encode()[sent:])


def connect_console(path: str) -> int:
    """Return a descriptor connected to a guest's console. Raises HostFault if QEMU has ended."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(path)
    except OSError as error:
        connection.close()
        raise HostFault(f"its console {path}: {error.strerror}") from None
    return connection.detach()
