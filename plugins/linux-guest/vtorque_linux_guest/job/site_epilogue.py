"""Run the site's epilogue in each guest before the guest ends. Runs as root on each node.

If the job shell has already run the site's epilogue in a guest, the guest does not run it again. An
unprivileged process parses the guest's answers.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vtorque_core.api import HostFault
from vtorque_core.api.acquired import Resource
from vtorque_core.api.unprivileged_parser import parse_unprivileged
from vtorque_linux_guest.guest.contract import EPILOGUE_CLIENT, RUN_SOCKET
from vtorque_linux_guest.job.frames import printable_text
from vtorque_linux_guest.job.start_request import StartRequest
from vtorque_linux_guest.job.stream import Session

HELLO_SECONDS = 5.0
"""Timeout for the agent's answer. A hung guest delays the node's epilogue this long."""

_PIPE = 1 << 20  # bytes of output at most (pipe(7), /proc/sys/fs/pipe-max-size)
_TOLD = 2000  # bytes from the end of the output, as for a failed setup step
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SiteEpilogue(Resource):
    """A guest whose site epilogue must still run. Releasing the resource runs the site epilogue.

    The resource is acquired when the guest is ready. Resources are released in reverse order, so
    the site epilogue runs before the guest ends. ``seconds`` is its time limit.
    """

    kind = "linux-epilogue"

    run_dir: str
    hostname: str
    rank: int
    seconds: float

    def create(self) -> None:
        """Do nothing: the guest already has the scripts."""

    def release(self) -> None:
        """Run the site's epilogue in the guest. A failure is only logged."""
        where = f"site epilogue of {self.hostname} (rank {self.rank})"
        try:
            code, said = self._run()
        except (HostFault, OSError, ValueError) as error:
            _log.warning("%s: not completed (limit %g s): %s", where, self.seconds, error)
            return
        words = f": {said}" if said else ""
        if code:
            _log.warning("%s: exit code %d%s", where, code, words)
        else:
            _log.info("%s: done%s", where, words)

    def _run(self) -> tuple[int, str]:
        until = time.monotonic() + self.seconds
        with socket.socket(socket.AF_UNIX) as port:
            port.setblocking(False)  # the user can open the port, too, and fill its queue
            port.connect(str(Path(self.run_dir, RUN_SOCKET)))
            port.setblocking(True)
            told = parse_unprivileged(
                _ask, min(HELLO_SECONDS, self.seconds), until=until, files=[port.fileno()]
            )
            code, said = told
        return int(code), printable_text(said)


def _ask(hello: float, port: int) -> Iterator[bytes]:
    """Run the site's epilogue in the guest; yield its exit code and the end of its output."""
    reading, writing = os.pipe()
    with contextlib.suppress(OSError):
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, _PIPE)
    with socket.socket(fileno=port) as connection:
        session = Session(connection)
        session.hello(time.monotonic() + hello)
        start = StartRequest((EPILOGUE_CLIENT,), {"PATH": _PATH}, "/", merge=True)
        status = session.run(start, None, writing, writing)
    os.close(writing)
    said = b""
    while part := os.read(reading, 1 << 16):
        said = (said + part)[-_TOLD:]
    yield str(status.code).encode()
    yield said.strip()
