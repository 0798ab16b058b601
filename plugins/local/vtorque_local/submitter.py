"""Submit jobs to ``local``, with a common subset of Torque's qsub options. Privileges: the user."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from vtorque_core.api import EXIT_OUTPUT, OutputError, Paths, UsageError, VtorqueError, printable
from vtorque_core.api.batch_system import JobInfo, Needs, SubmitArgs
from vtorque_core.api.directives import vm_directives
from vtorque_core.api.submission import to_token
from vtorque_core.api.values import is_personal
from vtorque_local import qsub
from vtorque_pbs import convention as pbs

if TYPE_CHECKING:
    from vtorque_core.api.node_job import Site

EXIT_INTERRUPTED = 130  # a shell's exit status after SIGINT
_AWAY = 0  # returned instead of an inode if the socket does not exist


class LocalSubmitter:
    """Implementation of :class:`vtorque_core.api.batch_system.Submitter` for ``local``."""

    naming = "-N"

    def __init__(self, paths: Paths = Paths(), start: Sequence[str] = ()) -> None:  # noqa: B008
        """Create a submitter. ``start`` is the command to start a personal service, or empty."""
        self._socket, self._start = paths.run / "local.sock", start

    def split(self, argv: Sequence[str]) -> SubmitArgs:
        """Parse the command line and read the script.

        Raises:
            UsageError: The arguments or the script are invalid.
            Refused: A directive is invalid.
        """
        args = pbs.split_qsub(argv)
        content = qsub.read_script(args)
        pbs.check_script(content)
        job = qsub.describe(args, content)
        return SubmitArgs(
            vm=args.vm,
            rest=args.rest,
            script=qsub.script_operand(args),
            content=content,
            shell=job.shell or None,
            interactive=job.interactive,
            vcpus_given=job.ppn or None,
            mib_given=job.mib or None,
            directives=tuple(vm_directives(content)),
        )

    def submit(self, args: SubmitArgs, blob: bytes | None, needs: Needs | None) -> int:
        """Submit a job and print its id.

        With ``-W block=true`` or ``-I``, wait for the job and return its exit code.
        """
        content = args.content or b""
        wanted = qsub.describe(pbs.split_qsub(args.rest), content)
        script, here = base64.b64encode(content).decode(), qsub.working_directory()
        message: dict[str, Any] = {"op": "submit", "argv": args.rest, "script": script}
        token = "" if blob is None else to_token(blob)
        qsub.check_surroundings(wanted, here, bare=blob is None)
        environ = dict(os.environ)
        if token and args.interactive and not wanted.display:
            environ["DISPLAY"] = ""  # the job shell must use -X's display, not -V's
        message |= {"environ": environ, "cwd": here, "token": token}
        if args.interactive:
            return self._interactive(message)
        outputs = qsub.output_paths(wanted, socket.gethostname(), here)
        qsub.check_outputs(path for path, _ in outputs)
        with self._ask(message) as (answer, lines):
            try:
                sys.stdout.write(f"{answer['id']}\n")
                sys.stdout.flush()
                return _wait(lines) if wanted.attributes.get("block") == "true" else 0
            except OutputError as error:
                why = str(error) or "standard output has no reader"
                sys.stderr.write(f"vsub: job {answer['id']} is submitted, but {why}\n")
                return EXIT_OUTPUT
            except KeyboardInterrupt:
                sys.stderr.write(
                    f"\nvsub: interrupted; job {answer['id']} is still queued or running. "
                    f"To cancel it: vmgr cancel '{answer['id']}'\n"
                )
                return EXIT_INTERRUPTED

    def jobs(self) -> Iterable[JobInfo]:
        """Return the user's jobs, or all jobs for root."""
        with self._ask({"op": "list"}) as (answer, _):
            host = socket.gethostname()
            return [
                JobInfo(**job, node=host, nodes=(host,) if job["state"] == "R" else ())
                for job in answer["jobs"]
            ]

    def cancel(self, job_id: str) -> int:
        """Cancel a job. Raise UsageError if the user has no such job."""
        with self._ask({"op": "cancel", "id": job_id}):
            return 0

    def shut_down(self) -> None:
        """Stop the service. Only root and the service's owner may stop it."""
        with self._ask({"op": "stop"}):
            return

    def _interactive(self, message: dict[str, Any]) -> int:
        if not os.isatty(0) or not os.isatty(1):
            raise UsageError("-I: standard input and output must be a terminal")
        errors = 2 if os.isatty(2) else 1  # the service accepts only terminals
        with self._ask(message, (0, 1, errors)) as (answer, lines), qsub.terminal_kept():
            try:
                sys.stderr.write(f"vsub: waiting for job {answer['id']} to start\n")
                signal.signal(signal.SIGWINCH, lambda *_: _send_resize(lines))
                code = _wait(lines)
            except KeyboardInterrupt:
                sys.stderr.write(f"\nvsub: interrupted; job {answer['id']} is canceled\n")
                return EXIT_INTERRUPTED
        sys.stderr.write(f"\nvsub: job {answer['id']} completed\n")
        return code

    @contextlib.contextmanager
    def _ask(self, message: Mapping[str, Any], fds: Sequence[int] = ()) -> Iterator[Any]:
        data = json.dumps(message).encode() + b"\n"
        line = b""
        while not line:
            with self._connect() as sock, sock.makefile("rb") as lines:
                asked = self._socket_inode()
                with contextlib.suppress(OSError):  # detected by a missing answer
                    sent = socket.send_fds(sock, [data], fds) if fds else 0
                    sock.sendall(data[sent:])
                with contextlib.suppress(OSError):  # killed before it read the request
                    line = lines.readline()
                if line:
                    answer = json.loads(line)
                    if "error" in answer:
                        raise UsageError(answer["error"])
                    yield answer, lines
                elif not self._start or asked == self._socket_inode() != _AWAY:  # otherwise retry
                    raise VtorqueError(
                        "the local batch system ended before it answered: try again later"
                    )

    def _connect(self) -> socket.socket:
        reason = ""
        for start in (self._start, ()):
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.connect(str(self._socket))
                return connection
            except OSError as error:
                connection.close()
                reason = reason or f"{error.strerror}; an admin starts it with: vtorque local serve"
            if start:  # of two concurrent starts, one fails and uses the other's service
                import subprocess  # noqa: PLC0415 - not by each vsub

                done = subprocess.run(
                    start, stdin=subprocess.DEVNULL, capture_output=True, check=False
                )
                reason = printable(done.stderr.decode("utf-8", "replace").strip(), 500) or reason
        raise VtorqueError(f"the local batch system does not answer at {self._socket}: {reason}")

    def _socket_inode(self) -> int:
        """Return the socket's inode, which identifies the service, or 0 without a socket."""
        try:
            return self._socket.lstat().st_ino
        except FileNotFoundError:
            return _AWAY


def create_submitter(site: Site) -> LocalSubmitter:
    """Return the submitter. The submitter of a personal site starts the service when needed."""
    return LocalSubmitter(site.paths, service_command(site.path) if is_personal(site) else ())


def service_command(config: Path) -> tuple[str, ...]:
    """Return the command that starts the service of a user's personal site."""
    argv = (sys.executable, "-I", "-m", "vtorque_core.cli.vtorque")
    return (*argv, "local", "serve", "--config", str(config))


def _send_resize(connection: BinaryIO) -> None:
    with contextlib.suppress(OSError):  # the service has ended
        os.write(connection.fileno(), b"\n")


def _wait(lines: BinaryIO) -> int:
    line = lines.readline()
    if not line:
        sys.stderr.write("vsub: the batch system has ended; the job is lost if it was running\n")
        return pbs.shell_code(pbs.STATUS_LOST)
    result = json.loads(line)
    if result["reason"]:
        sys.stderr.write(f"vsub: {result['reason']}\n")
    return int(result["code"])
