"""Relay that can cut, split or forge data between a driver and its guest's ports.

A port is a Unix socket in the guest's run directory, as QEMU creates it.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

_CHUNK = 1 << 16


class Wires:
    """A relay for the ports of a simulated guest, as a context manager.

    Attributes:
        passed: data that reached the host through the watched port.
        instead: functions that replace the guest, by port: :func:`send_nothing` or
            :func:`send_data`.
    """

    def __init__(
        self, run_dir: Path, ports: Iterable[str], connect: Callable[[str], socket.socket]
    ) -> None:
        self._run_dir, self._ports, self._connect = run_dir, tuple(ports), connect
        self._open: list[socket.socket] = []
        self._lock = threading.Lock()
        self._gone = False
        self.port = ""
        self.cut: int | None = None
        self.last = b""
        self.chunk = _CHUNK
        self.passed = bytearray()
        self.instead: dict[str, Callable[[socket.socket], None]] = {}

    def watch(
        self, port: str, *, cut: int | None = None, last: bytes = b"", chunk: int = _CHUNK
    ) -> None:
        """Record this port's data from now on, and cut or split it.

        ``cut``: number of bytes after which the guest sends ``last`` and disappears. ``chunk``:
        maximum number of bytes that reach the host at once.
        """
        self.port, self.cut, self.last, self.chunk = port, cut, last, chunk
        self.passed = bytearray()

    def __enter__(self) -> Wires:
        for name in self._ports:
            listener = socket.socket(socket.AF_UNIX)
            listener.bind(str(self._run_dir / name))
            listener.listen(8)
            self._open.append(listener)
            threading.Thread(target=self._serve, args=(listener, name), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        for name in self._ports:
            (self._run_dir / name).unlink(missing_ok=True)

    def end(self) -> None:
        """End the guest: its ports refuse connections, and open connections break."""
        with self._lock:
            self._gone = True
            for each in self._open:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
            for each in self._open:
                each.close()

    def _keep(self, connection: socket.socket) -> bool:
        with self._lock:
            if not self._gone:
                self._open.append(connection)
            else:
                connection.close()
            return not self._gone

    def _serve(self, listener: socket.socket, name: str) -> None:
        with contextlib.suppress(OSError):
            while True:
                ours = listener.accept()[0]
                if not self._keep(ours):
                    return
                if name in self.instead:
                    self._misbehave(self.instead[name], ours)
                else:
                    self._pass(ours, name)

    def _misbehave(self, guest: Callable[[socket.socket], None], ours: socket.socket) -> None:
        with contextlib.suppress(OSError):
            guest(ours)
        with contextlib.suppress(OSError):
            ours.shutdown(socket.SHUT_RDWR)

    def _pass(self, ours: socket.socket, name: str) -> None:
        if name == self.port and self.cut == 0:
            self.end()
            return
        theirs = self._connect(name)
        if not self._keep(theirs):
            return
        back = threading.Thread(target=self._relay_to_host, args=(theirs, ours, name), daemon=True)
        back.start()
        with contextlib.suppress(OSError):
            while data := ours.recv(_CHUNK):
                theirs.sendall(data)
        with contextlib.suppress(OSError):
            theirs.shutdown(socket.SHUT_RDWR)
        back.join()

    def _relay_to_host(self, theirs: socket.socket, ours: socket.socket, name: str) -> None:
        watched = name == self.port
        with contextlib.suppress(OSError):
            while data := theirs.recv(self.chunk if watched else _CHUNK):
                if watched and self.cut is not None:
                    data = data[: self.cut - len(self.passed)]
                ours.sendall(data)
                self.passed += data if watched else b""
                if watched and len(self.passed) == self.cut:
                    ours.sendall(self.last)
                    self.end()
                    return
        with contextlib.suppress(OSError):
            ours.shutdown(socket.SHUT_RDWR)


def send_nothing(connection: socket.socket) -> None:
    """Send nothing, and read until the host closes the connection."""
    while connection.recv(_CHUNK):
        pass


def send_data(data: Iterable[bytes], *, stays: bool = True) -> Callable[[socket.socket], None]:
    """Return a fake guest that sends this data and, if ``stays`` is false, then disconnects."""

    def guest(connection: socket.socket) -> None:
        for piece in data:
            connection.sendall(piece)
        if stays:
            send_nothing(connection)

    return guest


def flood(piece: bytes, most: int = 5 << 18) -> Iterator[bytes]:
    """Yield ``piece`` repeatedly, up to ``most`` bytes in total."""
    for _ in range(most // len(piece)):
        yield piece
