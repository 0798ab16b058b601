"""Answer a request on the job's node: run ``vmgr`` and send its output to the requesting host.

``python -I -m vtorque_login.answer CONFIG JOB NAME [NODE]``, as the job's owner. NAME is the name
of the request. Does nothing if NODE is another node.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from vtorque_core.api import VtorqueError, kept_records
from vtorque_core.live import service
from vtorque_login import channel, companion, requests
from vtorque_login.requests import LoginRequest

CONNECT = 10.0  # seconds to reach the waiting command
_JOB_ENDED = threading.Event()


def answer(
    config: Path, job_id: str, name: str, is_allowed: Callable[[str], bool] = requests.is_other_host
) -> int:
    """Answer the request ``name``, and return the exit code of the command that it contains.

    ``is_allowed`` checks the IP address of the requesting host.

    Raises:
        Refused: The request is invalid.
        channel.ChannelBroken: The requesting host did not prove that it knows the request's key.
        OSError: The home directory or the requesting host is unreachable.
    """
    with requests.directory(job_id) as place:
        request = requests.parse_request(requests.read(place, name), job_id)
        if not requests.withdraw(place, name):
            return 0  # another process answers it
    if not is_allowed(request.host):
        return 1
    with socket.create_connection((request.host, request.port), CONNECT) as connection:
        until = time.monotonic() + channel.HANDSHAKE
        stream = channel.answer(connection, bytes.fromhex(request.key), until)
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        code = _run(stream, request, config)
        ended = code and _JOB_ENDED.is_set()
        stream.send(channel.END, b"" if ended else bytes([code & 0xFF]))
        connection.shutdown(socket.SHUT_WR)
        _await_close(connection)
    return code


def _await_close(connection: socket.socket) -> None:
    """Read and ignore input until the other side closes the connection.

    If this side closed the connection first and left input unread, the kernel would discard output
    that the other side has not received (RFC 1122, 4.2.2.13).
    """
    connection.settimeout(CONNECT)
    with contextlib.suppress(OSError):
        while connection.recv(channel.LARGEST):
            pass


def _run(stream: channel.Stream, request: LoginRequest, config: Path) -> int:
    command, *rest = request.words
    argv = service.vmgr(config, command, "--here", *rest)
    environ = companion.answer_environ()
    if request.term:
        size = struct.pack("HHHH", request.rows, request.columns, 0, 0)
        return _on_terminal(stream, argv, environ | {"TERM": request.term}, size)
    pipe = subprocess.PIPE
    with subprocess.Popen(
        argv, stdin=pipe, stdout=pipe, stderr=pipe, env=environ, cwd="/"
    ) as child:
        assert child.stdin and child.stdout and child.stderr  # noqa: S101 - pipes
        signal.signal(signal.SIGTERM, lambda *_: _end_with_job(child.terminate))
        threads = [
            _thread(_send, stream, channel.OUT, child.stdout.fileno()),
            _thread(_send, stream, channel.ERR, child.stderr.fileno()),
        ]
        _thread(_receive, stream, child.stdin.fileno(), child.terminate, child.stdin)
        for thread in threads:
            thread.join()
    return _code(child.returncode)


def _on_terminal(
    stream: channel.Stream, argv: Sequence[str], environ: dict[str, str], size: bytes
) -> int:
    pid, master = pty.fork()
    if pid == 0:
        try:
            os.chdir("/")
            fcntl.ioctl(0, termios.TIOCSWINSZ, size)
            os.execve(argv[0], list(argv), environ)  # noqa: S606
        finally:
            os._exit(127)
    over = threading.Event()

    def end(*_: object) -> None:
        if not over.is_set():
            os.kill(pid, signal.SIGHUP)

    signal.signal(signal.SIGTERM, lambda *_: _end_with_job(end))
    _thread(_receive, stream, master, end, None)
    _send(stream, channel.OUT, master)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    over.set()
    return _code(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


def _end_with_job(end: Callable[[], None]) -> None:
    _JOB_ENDED.set()
    end()


def _thread(work: Callable[..., None], *args: object) -> threading.Thread:
    thread = threading.Thread(target=work, args=args, daemon=True)
    thread.start()
    return thread


def _send(stream: channel.Stream, kind: int, descriptor: int) -> None:
    with contextlib.suppress(OSError):  # EIO: no process has the terminal open, pty(7)
        while data := os.read(descriptor, channel.LARGEST):
            stream.send(kind, data)


def _receive(
    stream: channel.Stream, descriptor: int, end: Callable[[], None], pipe: IO[bytes] | None
) -> None:
    with contextlib.suppress(OSError, ValueError, channel.ChannelBroken):
        while (frame := stream.receive()) is not None:
            kind, data = frame
            if kind == channel.SIZE and pipe is None and len(data) == 4:
                size = struct.pack("HHHH", *struct.unpack(">HH", data), 0, 0)
                fcntl.ioctl(descriptor, termios.TIOCSWINSZ, size)
            elif kind == channel.IN and data:
                _write(descriptor, data)
            elif kind == channel.IN and pipe is not None:
                pipe.close()
    end()


def _write(descriptor: int, data: bytes) -> None:
    with contextlib.suppress(BrokenPipeError):  # it reads no more input, but may still write output
        while data:
            data = data[os.write(descriptor, data) :]


def _code(status: int) -> int:
    return status if status >= 0 else 128 - status


def _is_recorded(config: Path, job_id: str, node: str) -> bool:
    """Return whether ``node`` is in the job's records on this node, which root has written."""
    places = kept_records.find(service.paths(config), job_id, os.getuid())
    return bool(places) and places[-1].facts().get("node") == node


def main() -> None:
    """Answer a request. Ignore errors: the requesting command reports that no answer came."""
    config, job_id, name, *node = sys.argv[1:]
    if node and not _is_recorded(Path(config), job_id, node[0]):
        return
    with contextlib.suppress(OSError, VtorqueError):
        answer(Path(config), job_id, name)


if __name__ == "__main__":
    main()
