"""For tests: the real agent as a process of this machine, with unix sockets for its ports."""

import contextlib
import os
import tempfile
import threading
import time
from typing import Any

from patience import LONG
from vtorque_linux_guest.job.events import Events
from vtorque_linux_guest.job.start_request import StartRequest
from vtorque_linux_guest.job.status_port import StatusReader
from vtorque_linux_guest.job.stream import ExitStatus, Session
from vtorque_testing import agent_guest

SANITIZED = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
"""Flags for build_agent (with cc="gcc"): memory errors and undefined behaviour end the agent."""
OFTEN = "-DVT_RETRY_MS=1"  # tests connect often
ENV = {"PATH": "/usr/local/bin:/usr/bin:/bin"}


class HostedAgent(agent_guest.LocalAgent):
    """The kit's, with the host side's sessions."""

    def ready(self) -> None:
        """Wait until the agent has reported READY; its status connection is kept."""
        list(StatusReader(self.status()).steps(time.monotonic() + LONG))

    def session(self) -> Session:
        """A session on the agent's next connection, after HELLO."""
        session = Session(self.connect())
        session.hello(time.monotonic() + LONG)
        return session


def sh(script: str, **more: Any) -> StartRequest:
    """A shell script as a Start; `more` are further fields of Start."""
    return StartRequest(argv=("/bin/sh", "-c", script), env=ENV, **more)


def run(
    session: Session, start: StartRequest, stdin: bytes = b"", events: Events | None = None
) -> tuple[ExitStatus, bytes, bytes]:
    """One run with files as its output and a pipe, fed by a thread, as its input."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        read, write = os.pipe()
        feeder = threading.Thread(target=_feed, args=(write, stdin))
        feeder.start()
        try:
            status = session.run(start, read, out.fileno(), err.fileno(), events)
        finally:
            os.close(read)
            feeder.join(LONG)
        out.seek(0)
        err.seek(0)
        return status, out.read(), err.read()


def _feed(fd: int, data: bytes) -> None:
    with contextlib.suppress(BrokenPipeError):
        while data:
            data = data[os.write(fd, data[:65536]) :]
    os.close(fd)
