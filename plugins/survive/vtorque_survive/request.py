"""How a job's owner asks root's watcher: one word in one datagram, to the job's own socket.

The socket is root's, in the job's directory; the job's user may write to it, and nobody else can.
Root reads at most one word, which is one of two, and waits for nobody; what does not fit into the
socket's queue waits at its sender. It answers who has an abstract address (unix(7)): another kind
is a path, which a user could have lead anywhere.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from pathlib import Path

from vtorque_core.api import HostFault, Paths

SUSPEND, RESUME = "suspend", "resume"
_WORDS = {word.encode(): word for word in (SUSPEND, RESUME)}
_ANSWER = 4096  # bytes
_LOOK = 0.05  # seconds between two looks for a watcher that begins


def path_of(paths: Paths, key: str) -> Path:
    """Return the socket of a job attempt on this node."""
    return paths.job_run(key) / "suspend.sock"


def listen(path: Path, uid: int) -> socket.socket:
    """Return a new socket at this path in a directory of root's, for a user. Raises OSError."""
    path.unlink(missing_ok=True)
    made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    try:
        before = os.umask(0o177)
        try:
            made.bind(str(path))
        finally:
            os.umask(before)
        os.chown(path, uid, -1, follow_symlinks=False)
    except BaseException:
        made.close()
        raise
    return made


def taken(connection: socket.socket) -> tuple[str, bytes] | None:
    """Return a word that was asked, and who is to be answered; None: there is none. Never waits."""
    try:
        word, whose = connection.recvfrom(16)
    except OSError:
        return None
    if word not in _WORDS:
        return None
    return _WORDS[word], whose if isinstance(whose, bytes) and whose[:1] == b"\0" else b""


def answer(connection: socket.socket, whose: bytes, text: str) -> None:
    """Tell who has asked; it is lost if they do not listen. Never waits."""
    if whose:
        with contextlib.suppress(OSError):
            connection.sendto(text.encode()[:_ANSWER], whose)


def ask(path: Path, word: str, seconds: float, patience: float = 0.0) -> str:
    """Return what the watcher says to it; empty: done. As the job's owner, or root.

    Waits ``seconds`` for the answer, and ``patience`` for a watcher that has just been started.
    Raises HostFault: nobody is there, or it is not answered in time.
    """
    until = time.monotonic() + patience
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as connection:
        connection.bind("")  # an abstract address that the kernel chooses
        connection.settimeout(seconds)
        while True:
            try:
                connection.sendto(word.encode(), str(path))
                return connection.recv(_ANSWER).decode("utf-8", "replace")
            except (ConnectionRefusedError, FileNotFoundError) as error:
                if time.monotonic() >= until:
                    raise HostFault(
                        f"{path}: {error.strerror}: no process of vTorque's looks after the job; "
                        "ask your administrator to call the same command, which begins one"
                    ) from None
                time.sleep(_LOOK)
            except TimeoutError:
                raise HostFault(f"{path}: no answer within {seconds:g} s") from None
            except OSError as error:
                raise HostFault(f"{path}: {error.strerror}") from None
