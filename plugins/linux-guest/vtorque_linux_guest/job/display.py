"""Forward the X display of an interactive job (``-I -X``) into its guest.

ssh forwards the display's port in the guest (ssh(1), ``-R``). The guest is hostile, but can reach
only this display. Formats: X(7) for display names, Xau(3) for the Xauthority file.

Privileges: the job's user, in the job shell.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from vtorque_core.api import name_errors, printable
from vtorque_core.api.children import wait_readable
from vtorque_core.api.guest_driver import ReadyGuest
from vtorque_linux_guest.guest.contract import SPOOL, SSH_CONFIG
from vtorque_linux_guest.job.start_request import GuestFileData

SECONDS = 30.0  # a guest is ready before its sshd listens
ENVIRON = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8"}  # not the user's PATH: guests can write

_NAME = re.compile(r"(localhost|127\.0\.0\.1|unix)?:([0-9]{1,4})(\.[0-9]{1,2})?", re.ASCII)
_TCP = 6000  # the port of display 0
_LOCAL, _WILD = 256, 65535  # address families: this host's name, any host
_COOKIE = b"MIT-MAGIC-COOKIE-1"
_MAX_FILE, _MAX_COOKIE = 1 << 20, 256  # bytes
_FILE = ".vtorque-xauthority"
_UP = b"vtorque: the display is there\n"
_MAX_SAID = 1 << 16  # bytes that the user's profile in the guest may print before _UP


class NoDisplay(Exception):
    """Error if the guest cannot use the display; the message is the reason."""


@dataclass(frozen=True)
class Display:
    """A display of this node. The guest uses the same ``number`` and ``screen``.

    ``end`` is the address to which ssh forwards connections.
    """

    number: int
    screen: str
    end: str
    cookie: bytes

    @property
    def environ(self) -> dict[str, str]:
        """The X variables of programs in the guest.

        With a host name in DISPLAY, X clients use TCP and no shared memory.
        """
        return {
            "DISPLAY": f"localhost:{self.number}{self.screen}",
            "XAUTHORITY": f"{SPOOL}/{_FILE}",
        }

    @property
    def file(self) -> GuestFileData:
        """The guest's Xauthority file. Its cookie is valid for any host name."""
        parts = (b"", b"%d" % self.number, _COOKIE, self.cookie)
        data = b"".join(len(part).to_bytes(2, "big") + part for part in parts)
        return GuestFileData(_FILE, _WILD.to_bytes(2, "big") + data)


def find_display(environ: Mapping[str, str]) -> Display:
    """Return the display that DISPLAY names, with its cookie. Raises NoDisplay."""
    name = environ["DISPLAY"]
    match = _NAME.fullmatch(name)
    if match is None:
        raise NoDisplay(f"DISPLAY={printable(name, 100)} is not a display of this node")
    host, number, screen = match[1] or "unix", int(match[2]), match[3] or ""
    end = f"/tmp/.X11-unix/X{number}" if host == "unix" else f"{host}:{_TCP + number}"  # noqa: S108
    path = Path(environ.get("XAUTHORITY") or Path(environ.get("HOME", "/"), ".Xauthority"))
    cookie = _cookie(path, number)
    if cookie is None:
        where = printable(str(path), 200)
        raise NoDisplay(f"{where} has no cookie for display {printable(name, 100)} of this node")
    return Display(number, screen, end, cookie)


def _cookie(path: Path, number: int) -> bytes | None:
    """Return the cookie that an X client on this node would use."""
    here = (_LOCAL, os.fsencode(socket.gethostname()))
    try:
        # Code in guests can write to the user's home, so never wait for a FIFO there.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            data = file.read(_MAX_FILE) or b""
    except (OSError, ValueError):
        return None
    for family, address, of_display, kind, cookie in _entries(io.BytesIO(data)):
        ours = family == _WILD or (family, address) == here
        if ours and of_display in (b"", b"%d" % number) and kind == _COOKIE:
            return cookie if 0 < len(cookie) <= _MAX_COOKIE else None
    return None


def _entries(file: io.BytesIO) -> Iterator[tuple[int, bytes, bytes, bytes, bytes]]:
    def part() -> bytes:
        return file.read(int.from_bytes(file.read(2), "big"))

    while family := file.read(2):
        yield int.from_bytes(family, "big"), part(), part(), part(), part()


@contextlib.contextmanager
def forward_display(guest: ReadyGuest, environ: Mapping[str, str]) -> Iterator[Display]:
    """Forward the job shell's display into the guest while the context is active.

    ssh runs in its own session, so the job's signals do not reach it. If the job shell is killed,
    ssh's command in the guest, cat(1), reads the end of its input, and ssh exits. Raises NoDisplay.
    """
    config = guest.run_dir / SSH_CONFIG
    if not config.exists():
        raise NoDisplay("the image has no sshd, or the guest's address is unknown")
    display = find_display(environ)
    options = {"BatchMode": "yes", "ClearAllForwardings": "no", "ExitOnForwardFailure": "yes"}
    options |= {"ConnectionAttempts": f"{SECONDS:.0f}", "LogLevel": "ERROR"}  # one per second
    words = [word for each in options.items() for word in ("-o", "=".join(each))]
    words += ["-T", "-R", f"localhost:{_TCP + display.number}:{display.end}", guest.hostname]
    say = f"echo {_UP.decode().strip()!r}; exec cat"
    pipe = subprocess.PIPE
    with name_errors("ssh", fault=NoDisplay):
        ssh = subprocess.Popen(
            ["ssh", "-F", str(config), *words, say], stdin=pipe, stdout=pipe,
            stderr=subprocess.STDOUT, env=ENVIRON, cwd="/", start_new_session=True,
        )  # fmt: skip
    with ssh:
        try:
            assert ssh.stdout is not None  # noqa: S101 - it is a pipe
            _await(ssh.stdout.fileno())
            yield display
        finally:
            ssh.kill()


def _await(output: int) -> None:
    """Wait until ssh's command runs in the guest: sshd then listens on the display's port."""
    said, until = b"", time.monotonic() + SECONDS
    while _UP not in said:
        if not wait_readable([output], until - time.monotonic()):
            raise NoDisplay(f"the guest's sshd did not answer within {SECONDS:.0f} s")
        part = os.read(output, 4096)
        said += part
        if not part or len(said) > _MAX_SAID:
            last = said.decode("utf-8", "replace").strip().rpartition("\n")[2]
            raise NoDisplay(f"ssh to the guest failed: {printable(last, 300) or 'no message'}")
