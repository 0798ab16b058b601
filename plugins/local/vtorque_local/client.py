"""Serve one client of the service, in a process with the client's uid.

This process reads, parses and stores everything from the client. The service gets only a
``LocalSubmission`` and two files that it does not parse: the script and the
input of :mod:`vtorque_local.become_job`. This process has the terminal of an interactive job, and
is the job's parent.

Protocol of ``<paths.run>/local.sock`` (mode 0666; 0600 for a personal service):

- Each connection carries one request: a JSON object in one line of at most 8 MiB. ``op`` is
  ``submit``, ``list``, ``cancel`` or ``stop``. The kernel identifies the caller (SO_PEERCRED,
  unix(7)).
- The answer is one line; ``error`` is a message for the user. After ``submit``, a second line with
  ``code`` and ``reason`` follows when the job ends.
- For ``-I``, the first byte carries the terminal's three descriptors (SCM_RIGHTS). After the
  answer, each byte from the client reports a new terminal size. If the client closes the
  connection, the job is canceled.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import resource
import select
import signal
import socket
import subprocess
import termios
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from vtorque_core.api import UsageError, VtorqueError, printable
from vtorque_local import become_job, qsub
from vtorque_local.order import LocalSubmission, pack
from vtorque_pbs import convention as pbs

MAX_MESSAGE = 8 << 20  # bytes of a request, mostly the script
MAX_TIME = 10.0  # seconds to wait for a client's next bytes
MAX_ARGS = 10_000  # characters of -F: the wrapper's line must fit into a pipe, pipe(7)
GUARD = ("/usr/bin/setpriv", "--pdeathsig", "KILL", "--")  # ``become_job`` checks its parent
Limits = Mapping[int, tuple[int, int]]


class ServiceChannel(NamedTuple):
    """Channel to the service: two pipes, and files for the script and the job's environment."""

    ask: int
    hear: int
    script: int
    rest: int


def serve(connection: socket.socket, service: ServiceChannel, reading: int, limits: Limits) -> None:
    """Answer the client. After a submission, wait until the job ends or the client disconnects.

    Args:
        connection: Connection to the client.
        service: Channel to the service.
        reading: Pipe to close once the request has been answered.
        limits: Limits of a job for setrlimit(2).
    """
    terminal: list[int] = []
    with (
        os.fdopen(service.ask, "wb", buffering=0) as say,
        os.fdopen(service.hear, "rb", buffering=0) as told,
    ):
        connection.settimeout(MAX_TIME)
        try:
            words = _request(connection, terminal, service)
            say.write(pack(*words))
            answer = told.readline()
        except VtorqueError as error:
            answer = _line({"error": str(error)})
        except Exception as error:  # a hostile client may send anything
            answer = _line(
                {"error": f"bad request: {type(error).__name__}: {printable(str(error))}"}
            )
        connection.sendall(answer)
        os.close(reading)
        if b'"id"' in answer and b'"error"' not in answer:
            for kind, limit in limits.items():
                resource.setrlimit(kind, limit)
            _JobFollower(connection, say, told, terminal, service.rest).run()


def _request(
    connection: socket.socket, terminal: list[int], service: ServiceChannel
) -> tuple[str, ...]:
    first, terminal[:], *_ = socket.recv_fds(connection, 1, 3, socket.MSG_CMSG_CLOEXEC)
    with connection.makefile("rb") as lines:
        message = json.loads(first + lines.readline(MAX_MESSAGE))
    if message["op"] == "submit":
        return submission(message, terminal, service).words()
    if message["op"] == "cancel":
        return "cancel", str(message["id"])
    return (str(message["op"]),)


def submission(
    message: dict[str, Any], terminal: Sequence[int], service: ServiceChannel
) -> LocalSubmission:
    """Return the options of a new job that the service needs; write everything else to files.

    ``service.script`` gets the script. ``service.rest`` gets the job's environment, shell,
    arguments, directory and output files, which :mod:`vtorque_local.become_job` reads as the user.
    """
    content = base64.b64decode(message["script"], validate=True)
    want = qsub.describe(pbs.split_qsub([str(word) for word in message["argv"]]), content)
    environ = {str(name): str(value) for name, value in message["environ"].items()}
    if len(want.args) > MAX_ARGS:
        raise UsageError(f"-F has {len(want.args)} characters (limit: {MAX_ARGS})")
    if want.interactive != (len(terminal) == 3 and all(map(os.isatty, terminal))):
        raise UsageError("the submission has -I but no terminal, or a terminal but no -I")
    host, here = socket.gethostname(), str(message["cwd"])
    initdir = want.initdir and os.path.join(here, want.initdir)  # noqa: PTH118 (user's text)
    own = {"PATH": "/usr/local/bin:/usr/bin:/bin"} | qsub.variables(want, environ, host, here)
    needed = {
        "environ": own | ({"PBS_O_INITDIR": initdir} if initdir else {}),
        "shell": want.shell,
        "args": want.args,
        "directory": initdir,
        "outputs": qsub.output_paths(want, host, here),
    }
    files = (service.script, content), (service.rest, json.dumps(needed).encode())
    for descriptor, data in files:
        with os.fdopen(descriptor, "wb", closefd=False) as file:
            file.write(data)
    mem = want.resources.get("mem", "")
    more = (want.interactive, message["token"], want.array)
    return LocalSubmission(want.name, want.ppn, want.walltime, mem, *more)


class _JobFollower:
    """A submitted job that this process follows until its end; see ``entry.LocalClient``.

    An interactive job runs as a child of this process.
    """

    def __init__(
        self, connection: socket.socket, say: Any, told: Any, terminal: list[int], rest: int
    ) -> None:
        self._connection, self._say, self._told = connection, say, told
        self._terminal, self._rest = terminal, rest
        self._process: subprocess.Popen[bytes] | None = None
        self._poll = select.poll()
        for each in (connection, told):
            self._poll.register(each, select.POLLIN)
        self._heard = b""
        self._settings = termios.tcgetattr(terminal[0]) if terminal else []

    def run(self) -> None:
        """Run or follow the job until the client has the job's result or disconnects."""
        while True:
            ready = {descriptor for descriptor, _ in self._poll.poll()}
            if self._told.fileno() in ready and not self._listen():
                return
            if self._has_ended(ready):
                continue
            if self._connection.fileno() in ready and not self._resize():
                self._end_without_client()
                return

    def _resize(self) -> bool:
        """Send the job SIGWINCH for a new window size. Return False if the client has disconnected.

        The kernel sends SIGWINCH only to the client, whose session owns the terminal.
        """
        with contextlib.suppress(OSError):
            if self._connection.recv(64, socket.MSG_DONTWAIT):
                if self._process:
                    os.killpg(self._process.pid, signal.SIGWINCH)
                return True
        return False

    def _end_without_client(self) -> None:
        """Kill an interactive job, and restore the terminal if the job shell left it changed.

        A killed job shell leaves the terminal without echo or in raw mode. Changes by other
        programs, such as a shell's line editor, are kept.
        """
        if not self._process:
            return
        os.killpg(self._process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired, termios.error):
            self._process.wait(MAX_TIME)
            _, output, _, local, *_ = termios.tcgetattr(self._terminal[0])
            raw = not output & termios.OPOST
            if not local & termios.ECHO and (raw or local & termios.ICANON):
                termios.tcsetattr(self._terminal[0], termios.TCSANOW, self._settings)

    def _listen(self) -> bool:
        data = self._told.read(4096)
        *lines, self._heard = (self._heard + data).split(b"\n")
        return bool(data) and all(self._obey(line + b"\n") for line in lines)

    def _obey(self, line: bytes) -> bool:
        order = json.loads(line)
        if "start" in order:
            self._start(order["start"])
        elif "terminate" in order:
            if self._process:
                os.killpg(self._process.pid, signal.SIGTERM)
        else:
            self._connection.settimeout(MAX_TIME)
            self._connection.sendall(line)
            return False
        return True

    def _start(self, order: dict[str, Any]) -> None:
        given = os.memfd_create("order")
        os.write(given, json.dumps(order | {"starter": os.getpid()}).encode())
        argv = [*GUARD, *become_job.command(given, self._rest)]
        stdin, stdout, stderr = self._terminal
        self._process = subprocess.Popen(
            argv,
            env={},
            cwd="/",
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            pass_fds=(given, self._rest),
            start_new_session=True,
        )
        os.close(given)
        self._handle = os.pidfd_open(self._process.pid)
        self._poll.register(self._handle, select.POLLIN)

    def _has_ended(self, ready: set[int]) -> bool:
        if self._process is None or self._handle not in ready:
            return False
        os.killpg(self._process.pid, signal.SIGKILL)  # kill the rest of the group before reaping
        code = self._process.wait()
        self._poll.unregister(self._handle)
        os.close(self._handle)
        self._process = None
        with contextlib.suppress(OSError):
            self._say.write(pack("ended", str(code)))
        return True


def _line(answer: dict[str, Any]) -> bytes:
    return json.dumps(answer).encode() + b"\n"
