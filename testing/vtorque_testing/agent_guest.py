"""Replace a guest in tests: run the real vtorque-agent as a process of this machine.

Requires a C compiler and the distribution ``vtorque-linux-guest``.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Self

from vtorque_core.api.children import wait_readable
from vtorque_core.api.guest_driver import GuestDriver
from vtorque_linux_guest.agent.build import build_agent
from vtorque_testing.guest import ShellScripts
from vtorque_testing.planned import guest_plan

_LONG = 120.0  # seconds that suffice even on a busy machine
_NOBODY = 65534


class LocalAgent:
    """A running agent with its own configuration, as a context manager.

    ``binary`` is the agent's program, ``setup`` is the text of a setup script, and ``extra`` are
    further lines of the configuration. If the caller is root, jobs run as nobody (65534) with
    ``groups``; otherwise jobs run as the caller. At its end, the context raises AssertionError if
    the agent has crashed or a sanitizer has reported an error.
    """

    def __init__(  # noqa: PLR0913 - tests vary different ones
        self,
        binary: Path,
        setup: str | None = None,
        groups: Iterable[int] = (),
        extra: str = "",
        sync: bool = False,
        notify: str = "",
        status: bool = True,
        user: str = "tester",
        shell: str = "/bin/sh",
    ) -> None:
        # Not pytest's directory, because other users, such as the job's, cannot enter it.
        self.path = Path(tempfile.mkdtemp(prefix="vtorque-agent-"))
        self.path.chmod(0o755)
        self.home = self.path / "home"
        self.spool = self.path / "spool"
        for directory in (self.home, self.spool):
            directory.mkdir(mode=0o755)
        root = os.getuid() == 0
        self.uid, self.gid = (_NOBODY, _NOBODY) if root else (os.getuid(), os.getgid())
        os.chown(self.home, self.uid, self.gid)
        self.status_listener = self._listen("status")
        self.run_listener = self._listen("run")
        lines = [
            f"user={user}",
            f"uid={self.uid}",
            f"gid={self.gid}",
            f"groups={','.join(str(gid) for gid in groups)}",
            f"home={self.home}",
            f"shell={shell}",
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
        listener.settimeout(_LONG)
        return listener

    def status(self) -> socket.socket:
        """Return the agent's next connection to the status port."""
        return self._next(self.status_listener)

    def connect(self) -> socket.socket:
        """Wait for the agent's next connection to the run port, and return the host's socket."""
        return self._next(self.run_listener)

    def _next(self, listener: socket.socket) -> socket.socket:
        connection = listener.accept()[0]
        self._open.append(connection)
        return connection

    def log(self) -> str:
        """Return what the agent wrote to stderr."""
        return (self.path / "log").read_text(errors="replace")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        alive = self.process.poll() is None
        self.process.terminate()
        try:
            code = self.process.wait(_LONG)
        finally:
            self.process.kill()
            self._log.close()
            log = self.log()
            for sock in self._open:
                sock.close()
            shutil.rmtree(self.path, ignore_errors=True)
        if kind is None and not (alive and code == 0):
            raise AssertionError(f"the agent ended with exit code {code}: {log}")


class AgentHarness:
    """A :class:`vtorque_testing.guest.GuestHarness` for an ``AgentDriver``.

    Call :meth:`close` at the end.

    Args:
        driver: the driver under test.
        directory: a directory in which to build the agent.
        binary: an existing agent to use instead.
    """

    ready_port, ready_mark, run_port = "status.sock", b"READY 1\n", "run.sock"
    lacks: Mapping[str, str] = {}

    def __init__(self, driver: GuestDriver, directory: Path, binary: Path | None = None) -> None:
        self.driver = driver
        self.scripts = ShellScripts()
        self.patience = _LONG
        self.binary = binary or _build_agent(directory)
        self._top = Path(tempfile.mkdtemp(prefix="vtorque-guest-"))
        self.plan = guest_plan(run_dir=self._top, state_dir=self._top)
        self._agent: LocalAgent | None = None

    @contextlib.contextmanager
    def boot(self, fails: str = "") -> Iterator[None]:
        """Start an agent; if ``fails`` is set, its setup fails with this message."""
        setup = f"cat <<'END'\n{fails}\nEND\nexit 3\n" if fails else None
        with LocalAgent(self.binary, setup) as self._agent:
            listening = wait_readable([self._agent.run_listener.fileno()], _LONG)
            assert listening, "the agent has not opened its port"
            yield
        self._agent = None

    def connect(self, port: str) -> socket.socket:
        """Return the agent's next connection to the port with this name."""
        if self._agent is None:
            raise OSError("no guest is running: use boot() first")
        return self._agent.status() if port == self.ready_port else self._agent.connect()

    def close(self) -> None:
        """Remove the harness's directory."""
        shutil.rmtree(self._top, ignore_errors=True)


def _build_agent(directory: Path) -> Path:
    binary = directory / "vtorque-agent"
    if not binary.exists():
        build_agent(directory / f"agent-{os.getpid()}", "gcc", ("-O1",))
        (directory / f"agent-{os.getpid()}").rename(binary)  # other processes may build it, too
    return binary
