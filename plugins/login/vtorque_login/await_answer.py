"""Wait for a job to answer a request. The job connects back, as with ``qsub -I``."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
import sys
import termios
import threading
import time
import tty
from collections.abc import Iterator, Sequence
from queue import SimpleQueue
from typing import Any

from vtorque_core.api import HostFault, Refused, name_errors, printable
from vtorque_core.api.children import wait_readable
from vtorque_core.api.node_job import Site
from vtorque_login import channel, requests
from vtorque_login.requests import LoginRequest
from vtorque_login.settings import Settings

_POLL = 0.1  # seconds between two checks whether the job has taken the request
_MOST = 20  # unauthenticated connections at a time
_PORT = 9  # discard; nothing is sent, only the route is determined


def ask(
    words: Sequence[str], job_id: str, node: str, site: Site, *, on_first: bool, terminal: bool
) -> int:
    """Run the vmgr command ``words`` on a job's node, by a request; return the exit code.

    ``on_first`` is true if ``node`` is the job's first node, ``terminal`` if the command uses the
    caller's terminal. Privileges: the job's owner.

    Raises:
        HostFault: The job did not answer. The message names the failed step.
    """
    wait = site[Settings].answer_timeout
    key = os.urandom(channel.KEY)
    with socket.create_server((_own_address(node), 0)) as listener:
        host, port = listener.getsockname()[:2]
        size = os.get_terminal_size(0) if terminal else os.terminal_size((0, 0))
        request = LoginRequest(
            words=tuple(words), node="" if on_first else node,
            term=os.environ.get("TERM", "dumb") if terminal else "", rows=size.lines,
            columns=size.columns, host=host, port=port, key=key.hex(), expires=time.time() + wait,
        )  # fmt: skip
        stream = _await_connection(listener, request, job_id, node, key, wait)
    with stream:
        return _talk(stream, terminal=terminal)


def _own_address(node: str) -> str:
    with (
        name_errors(f"cannot connect to {printable(node)}"),
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe,
    ):
        probe.connect((node, _PORT))  # UDP, so nothing is sent (ip(7))
        return str(probe.getsockname()[0])


def _await_connection(
    listener: socket.socket, request: LoginRequest, job_id: str, node: str, key: bytes, wait: float
) -> channel.Stream:
    until = time.monotonic() + wait
    busy, wrong = 0, ""
    answers: SimpleQueue[channel.Stream | str] = SimpleQueue()
    with name_errors("~/.vtorque/requests"), requests.directory(job_id) as place:
        name = requests.write_request(place, request)
        try:
            while time.monotonic() < until:
                if wait_readable([listener.fileno()] if busy < _MOST else [], _POLL):
                    greeting = (*listener.accept(), key, until, answers)
                    threading.Thread(target=_greet, args=greeting, daemon=True).start()
                    busy += 1
                while not answers.empty():
                    answer = answers.get()
                    if not isinstance(answer, str):
                        return answer
                    busy, wrong = busy - 1, answer
        finally:
            taken = not requests.withdraw(place, name)  # NFS may list it for another minute
    if not taken:
        requests.remove_empty(job_id)
    raise HostFault(_stage(request, node, wait, taken=taken, wrong=wrong))


def _greet(
    connection: socket.socket,
    address: tuple[str, int],
    key: bytes,
    until: float,
    answers: SimpleQueue[channel.Stream | str],
) -> None:
    """Put the stream of a new connection, or the reason for its rejection, into ``answers``.

    Runs in a thread per connection, so that a silent client does not delay others.
    """
    connection.settimeout(channel.HANDSHAKE)
    try:
        until = min(until, time.monotonic() + channel.HANDSHAKE)
        stream = channel.greet(connection, key, until)
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        answers.put(stream)
    except (OSError, channel.ChannelBroken) as error:
        connection.close()
        answers.put(f"{address[0]}: {error}")


def _stage(request: LoginRequest, node: str, wait: float, *, taken: bool, wrong: str) -> str:
    if wrong:
        return f"a process connected that is not the job: {printable(wrong)}"
    where = f"{request.host} port {request.port}"
    if taken:
        return (
            f"the job has received the request, but {printable(node)} did not connect to {where} "
            f"within {wait:g} s ([plugin.login] answer_timeout). Check the firewall and the "
            "clocks"
        )
    return (
        f"the job did not answer within {wait:g} s ([plugin.login] answer_timeout). Check that "
        f"its guests are being started, that vtorque-login is installed on {printable(node)}, "
        "and that your home is the same there"
    )


# -- when the job has answered ------------------------------------------------------------------


def _talk(stream: channel.Stream, *, terminal: bool) -> int:
    threading.Thread(target=_send_input, args=(stream,), daemon=True).start()
    with _set_raw_mode(stream) if terminal else contextlib.nullcontext():
        try:
            while (frame := stream.receive()) is not None:
                kind, data = frame
                if kind == channel.END:
                    return data[0] if data else _script_has_ended()
                if kind in (channel.OUT, channel.ERR):
                    _write(1 if kind == channel.OUT else 2, data, raw=terminal)
        except BrokenPipeError:  # the reader of our output has closed it
            raise
        except (OSError, channel.ChannelBroken) as error:
            raise HostFault(f"the connection to the job broke: {error}") from None
    raise HostFault("the job's node has closed the connection: was the job killed?")


def _script_has_ended() -> int:
    sys.stderr.write("vmgr: the job's script has ended\n")
    return 128 + signal.SIGTERM


def _write(descriptor: int, data: bytes, *, raw: bool) -> None:
    """Write the command's output. If ``descriptor`` is a terminal, escape control characters.

    Code in a guest could otherwise control the user's terminal. ``raw`` disables this for commands
    such as ``vmgr ssh``, whose output needs control characters.
    """
    if not raw and os.isatty(descriptor):
        lines = data.decode("utf-8", "replace").split("\n")
        data = "\n".join(printable(line, 8192) for line in lines).encode()
    while data:
        data = data[os.write(descriptor, data) :]


def _send_input(stream: channel.Stream) -> None:
    with contextlib.suppress(OSError):
        while data := os.read(0, channel.LARGEST):
            stream.send(channel.IN, data)
        stream.send(channel.IN, b"")


@contextlib.contextmanager
def _set_raw_mode(stream: channel.Stream) -> Iterator[None]:
    """Set the terminal to raw mode, and send changes of its window size to the job.

    Raise Refused without a terminal.
    """

    def send_size(*_: Any) -> None:
        size = os.get_terminal_size()
        with contextlib.suppress(OSError):
            stream.send(channel.SIZE, struct.pack(">HH", size.lines, size.columns))

    try:
        before = termios.tcgetattr(0)
    except termios.error:
        raise Refused("standard input is not a terminal") from None
    handler = signal.signal(signal.SIGWINCH, send_size)
    tty.setraw(0, termios.TCSADRAIN)  # keep input typed before, as ssh does
    try:
        yield
    finally:
        termios.tcsetattr(0, termios.TCSAFLUSH, before)
        signal.signal(signal.SIGWINCH, handler)
