"""For tests: the real agent as a process of this machine, unix sockets in place of its ports."""

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

from patience import LONG
from vtorque_linux_guest.job.events import Events
from vtorque_linux_guest.job.start_request import Start
from vtorque_linux_guest.job.status_port import StatusReader
from vtorque_linux_guest.job.stream import ExitStatus, Session

SANITIZED = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
"""Flags for build_agent (with cc="gcc"): memory errors and undefined behaviour end the agent."""
OFTEN = "-DVT_RETRY_MS=1"  # tests connect often
NOBODY = 65534
ENV = {"PATH": "/usr/local/bin:/usr/bin:/bin"}


class LocalAgent:
    """The agent `binary` with its own configuration; a context manager.

    As root, jobs run as nobody (65534) with the groups given; else as the caller. `setup` is the
    text of a setup script. On leaving, an agent that died or reported a sanitizer's finding fails
    the test by AssertionError.
    """

    def __init__(
        self,
        binary: Path,
        setup: str | None = None,
        groups: Iterable[int] = (),
        extra: str = "",
        sync: bool = False,
        notify: str = "",
        status: bool = True,
    ) -> None:
        # Not pytest's directory: it is closed to other users, and the job is one.
        self.path = Path(tempfile.mkdtemp(prefix="vtorque-agent-"))
        self.path.chmod(0o755)
        self.home = self.path / "home"
        self.spool = self.path / "spool"
        for directory in (self.home, self.spool):
            directory.mkdir(mode=0o755)
        root = os.getuid() == 0
        self.uid, self.gid = (NOBODY, NOBODY) if root else (os.getuid(), os.getgid())
        os.chown(self.home, self.uid, self.gid)
        self.status_listener = self._listen("status")
        self.run_listener = self._listen("run")
        lines = [
            "user=tester",
            f"uid={self.uid}",
            f"gid={self.gid}",
            f"groups={','.join(str(gid) for gid in groups)}",
            f"home={self.home}",
            "shell=/bin/sh",
            *([f"status=unix:{self.path}/status"] if status else []),
            f"run=unix:{self.path}/run",
            f"spool={self.spool}",
            f"sync={int(sync)}",
        ]
        if setup is not None:
            (self.path / "setup").write_text(setup)
            lines.append(f"setup={self.path}/setup")
        self.conf = self.path / "agent.conf"
        self.conf.write_text("\n".join(lines) + "\n" + extra)
        self.conf.chmod(0o644)
        self._open = [self.status_listener, self.run_listener]
        self._log = (self.path / "log").open("wb")
        environment = {
            "PATH": os.environ["PATH"],
            "ASAN_OPTIONS": "detect_stack_use_after_return=0",
            "NOTIFY_SOCKET": notify,
        }
        self.process = subprocess.Popen(
            [binary, self.conf], stdin=subprocess.DEVNULL, stderr=self._log, env=environment
        )

    def _listen(self, name: str) -> socket.socket:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(self.path / name))
        listener.listen(8)
        listener.settimeout(LONG)
        return listener

    def status(self) -> socket.socket:
        """The agent's next connection to the status port."""
        connection = self.status_listener.accept()[0]
        self._open.append(connection)
        return connection

    def ready(self) -> None:
        """Wait until the agent has reported READY; its status connection is kept."""
        list(StatusReader(self.status()).steps(time.monotonic() + LONG))

    def connect(self) -> socket.socket:
        """The agent's next connection to the run port, as a host would have it."""
        connection = self.run_listener.accept()[0]
        self._open.append(connection)
        return connection

    def session(self) -> Session:
        """A session on the agent's next connection, after HELLO."""
        session = Session(self.connect())
        session.hello(time.monotonic() + LONG)
        return session

    def log(self) -> str:
        """What the agent wrote to stderr."""
        return (self.path / "log").read_text(errors="replace")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        alive = self.process.poll() is None
        self.process.terminate()
        try:
            code = self.process.wait(LONG)
        finally:
            self.process.kill()
            self._log.close()
            log = self.log()
            for sock in self._open:
                sock.close()
            shutil.rmtree(self.path, ignore_errors=True)
        if kind is None and not (alive and code == 0):
            raise AssertionError(f"the agent ended with {code}: {log}")


def sh(script: str, **more: Any) -> Start:
    """A shell script as a Start; `more` are further fields of Start."""
    return Start(argv=("/bin/sh", "-c", script), env=ENV, **more)


def run(
    session: Session, start: Start, stdin: bytes = b"", events: Events | None = None
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
