"""The submitting half of ``local``: the part of Torque's qsub that a newcomer uses. As the user."""

from __future__ import annotations

import base64
import json
import os
import re
import socket
import stat
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from vtorque_core.api_batch import JobInfo, SubmitArgs
from vtorque_core.batch import pbs_convention as pbs
from vtorque_core.directives import script_directives, vm_directives
from vtorque_core.errors import UsageError, VtorqueError, printable
from vtorque_core.names import Paths
from vtorque_core.units import walltime

MAX_SCRIPT = 4 << 20  # bytes, well below the service's MAX_MESSAGE in base64
RECONNECT = 60.0  # seconds that a waiting vsub gives a restarted service
_SUPPORTED = frozenset("NoejlvVdwSIWF")
_HOST_PATH = re.compile(r"([A-Za-z0-9][A-Za-z0-9.-]*):(/.*)", re.DOTALL | re.ASCII)


class LocalSubmitter:
    """See :class:`vtorque_core.api_batch.Submitter`."""

    def __init__(self, paths: Paths = Paths()) -> None:  # noqa: B008 (frozen)
        self._socket = paths.run / "local.sock"

    def split(self, argv: Sequence[str]) -> SubmitArgs:
        """Split the command line; read the script. Raises UsageError, Refused (a bad directive)."""
        args = pbs.split_qsub(argv)
        script = _script_of(args)
        interactive = ("I", "") in args.options
        given = b"" if interactive and script is None else _content(script)
        job = _job(args, given)
        return SubmitArgs(
            vm=args.vm,
            rest=args.rest,
            script=script,
            content=given if script is None and not interactive else None,
            shell=job["shell"],
            interactive=interactive,
            vcpus_given=job["ppn"] or None,
            mib_given=pbs.mem_mib(job["mem"]) if job["mem"] else None,
            directives=vm_directives(given),
        )

    def submit(self, args: SubmitArgs, blob: bytes | None) -> int:
        """Submit, print the job id; with ``-W block=true`` or ``-I`` wait and return its code."""
        split = pbs.split_qsub(args.rest)
        content = args.content
        if content is None:
            content = b"" if args.script is None else _content(args.script)
        message = _job(split, content) | {"op": "submit", "token": _token(blob)}
        message["script"] = base64.b64encode(content).decode()
        block = message.pop("block")
        if args.interactive:
            return self._interactive(message)
        job_id = str(self._ask(message)["id"])
        sys.stdout.write(job_id + "\n")
        sys.stdout.flush()
        return self._wait(job_id) if block else 0

    def jobs(self) -> Iterable[JobInfo]:
        """Return the user's own jobs; root's view has all."""
        for job in self._ask({"op": "list"})["jobs"]:
            yield JobInfo(**job, node=socket.gethostname())

    def cancel(self, job_id: str) -> int:
        """End a job, queued or running. Raises UsageError if the user has none of that id."""
        self._ask({"op": "cancel", "id": job_id})
        return 0

    def shut_down(self) -> None:
        """Stop the service; its owner only."""
        self._ask({"op": "shutdown"})

    def _interactive(self, message: dict[str, Any]) -> int:
        if not os.isatty(0) or not os.isatty(1):
            raise UsageError("-I: standard input and output must be a terminal")
        import termios  # noqa: PLC0415

        saved = termios.tcgetattr(0)
        with self._connect() as sock, sock.makefile("rb") as lines:
            _send(sock, message, fds=(0, 1, 2))
            job_id = _answer(lines.readline())["id"]
            sys.stderr.write(f"vsub: waiting for job {job_id} to start\n")
            try:
                result = _answer(lines.readline())
            finally:
                termios.tcsetattr(0, termios.TCSADRAIN, saved)
        sys.stderr.write(f"\nvsub: job {job_id} completed\n")
        return _told(result)

    def _wait(self, job_id: str) -> int:
        """Wait for the job's end, over a restart of the service too."""
        limit = time.monotonic() + RECONNECT
        while True:
            asked = time.monotonic()
            try:
                return _told(self._ask({"op": "wait", "id": job_id}))
            except UsageError:
                raise
            except VtorqueError:
                now = time.monotonic()
                if now - asked > 1:  # it had answered the call, so it died just now
                    limit = now + RECONNECT
                if now > limit:
                    raise
                time.sleep(0.2)

    def _connect(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.connect(str(self._socket))
        except OSError as error:
            sock.close()
            raise VtorqueError(
                f"the local batch system does not answer at {self._socket}: {error.strerror}; "
                "an admin starts it with: vtorque local serve"
            ) from None
        return sock

    def _ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        with self._connect() as sock, sock.makefile("rb") as lines:
            _send(sock, message)
            return _answer(lines.readline())


def _send(sock: socket.socket, message: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
    data = json.dumps(message).encode() + b"\n"
    try:
        sent = socket.send_fds(sock, [data], fds) if fds else 0
        sock.sendall(data[sent:])
    except OSError:
        return  # the answer, or its absence, tells


def _answer(line: bytes) -> dict[str, Any]:
    if not line.endswith(b"\n"):
        raise VtorqueError("the local batch system closed the connection")
    answer: dict[str, Any] = json.loads(line)
    if "error" in answer:
        raise UsageError(answer["error"])
    return answer


def _told(result: Mapping[str, Any]) -> int:
    if result["reason"]:
        sys.stderr.write(f"vsub: {result['reason']}\n")
    return int(result["code"])


def _token(blob: bytes | None) -> str | None:
    if blob is None:
        return None
    from vtorque_core.request import to_token  # noqa: PLC0415 (bare-metal jobs do not need it)

    return to_token(blob)


def _script_of(args: pbs.QsubArgs) -> str | None:
    operands = args.operands + (args.command or ())
    if len(operands) > 1:
        raise UsageError(
            f"{printable(operands[1])}: only one script; its arguments go to -F 'ARGS'"
        )
    return None if operands in ((), ("-",)) else operands[0]


def _content(script: str | None) -> bytes:
    """Return the bytes of the script, or of standard input."""
    name = "standard input" if script is None else printable(script)
    try:
        # O_NONBLOCK: a FIFO without a writer would hang here, open(2).
        source = 0 if script is None else os.open(script, os.O_RDONLY | os.O_NONBLOCK)
        with os.fdopen(source, "rb", closefd=script is not None) as file:
            if script is not None and not stat.S_ISREG(os.fstat(source).st_mode):
                raise UsageError(f"script {name}: is not a regular file")
            content = file.read(MAX_SCRIPT + 1)
    except (OSError, ValueError) as error:
        raise UsageError(f"script {name}: {getattr(error, 'strerror', error)}") from None
    if len(content) > MAX_SCRIPT:
        raise UsageError(f"script {name}: is longer than {MAX_SCRIPT >> 20} MiB")
    return content


def _job(args: pbs.QsubArgs, content: bytes) -> dict[str, Any]:
    """Return the submit message for the script's directives with the command line over them."""
    here = os.environ.get("PWD", "")
    if not here or not Path(here).is_dir() or not Path(here).samefile(Path.cwd()):
        here = str(Path.cwd())
    job: dict[str, Any] = {"name": pbs.default_job_name(_script_of(args)), "workdir": here}
    job |= {"initdir": None, "shell": None, "out": "", "err": "", "join": "n", "args": ""}
    job |= {"umask": 0o077, "walltime": 0, "ppn": 0, "mem": "", "interactive": False}
    job |= {"block": False, "environ": {}}
    whole, variables = False, ""
    options = [o for line in script_directives(content) for o in _directive(line)]
    for letter, value in [*options, *args.options]:
        if letter not in _SUPPORTED:
            raise _unsupported(letter if letter.startswith("--") else f"-{letter}")
        if letter == "V":
            whole = True
        elif letter == "v":
            variables = value
        else:
            job |= _OPTIONS[letter](value, job["workdir"])
    environ = dict(os.environ) if whole else {}
    if job["interactive"] and "TERM" in os.environ:
        environ["TERM"] = os.environ["TERM"]
    environ |= pbs.variable_list(variables, os.environ)
    job["environ"] = environ | pbs.origin_environ(os.environ, socket.gethostname(), job["workdir"])
    return job


def _directive(line: str) -> list[tuple[str, str]]:
    found = pbs.split_qsub(pbs.directive_words(line))
    return [(letter, value) for letter, value in found.options if letter != "I"]  # as Torque


def _unsupported(option: str) -> UsageError:
    return UsageError(
        f"{printable(option, 80)}: the local batch system does not support it; it knows "
        "-N -o -e -j -l walltime=,nodes=1[:ppn=N],mem= -v -V -d -w -S -I -W block=,umask= -F"
    )


def _path(value: str, workdir: str) -> str:
    """Return the path of ``[host:]path``; other hosts than this one are not reachable."""
    match = _HOST_PATH.fullmatch(value)
    host = socket.gethostname()
    if match and match[1] not in (host, host.split(".", maxsplit=1)[0], "localhost"):
        raise UsageError(f"{printable(value)}: output can only go to this host, {host}")
    return match[2] if match else value


def _join(value: str, workdir: str) -> dict[str, Any]:
    if value not in ("oe", "eo", "n"):
        raise UsageError(f"-j {printable(value)}: is not oe, eo or n")
    return {"join": value}


def _shell(value: str, workdir: str) -> dict[str, Any]:
    shell = value.partition("@")[0]
    if not shell.startswith("/"):
        raise UsageError(f"-S {printable(value)}: is not an absolute path")
    return {"shell": shell}


def _resources(value: str, workdir: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for part in value.split(","):
        key, _, wanted = part.partition("=")
        nodes = re.fullmatch(r"1(?::ppn=([1-9][0-9]{0,3}))?", wanted, re.ASCII)
        try:
            if key == "nodes" and nodes:
                found["ppn"] = int(nodes[1] or 0)
            elif key == "nodes":
                raise ValueError("is not 1 or 1:ppn=N: there is this one node only")
            elif key == "walltime":
                found["walltime"] = walltime(wanted)
            elif key == "mem":
                pbs.mem_mib(wanted)
                found["mem"] = wanted
            else:
                raise _unsupported(f"-l {key}")
        except ValueError as error:
            raise UsageError(f"-l {printable(part)}: {error}") from None
    return found


def _attributes(value: str, workdir: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for part in value.split(","):
        key, _, wanted = part.partition("=")
        if key == "block" and wanted.lower() in ("true", "false"):
            found["block"] = wanted.lower() == "true"
        elif key == "umask" and re.fullmatch(r"[0-7]{1,4}", wanted) and int(wanted, 8) <= 0o777:
            found["umask"] = int(wanted, 8)
        elif key in ("block", "umask"):
            raise UsageError(f"-W {printable(part)}: write block=true or umask=022 (octal)")
        else:
            raise _unsupported(f"-W {key}")
    return found


_OPTIONS: dict[str, Any] = {
    "N": lambda value, _: {"name": pbs.check_job_name(value)},
    "o": lambda value, where: {"out": _path(value, where)},
    "e": lambda value, where: {"err": _path(value, where)},
    "j": _join,
    "l": _resources,
    "d": lambda value, where: {"initdir": str(Path(where, value))},
    "w": lambda value, where: {"workdir": str(Path(where, value))},
    "S": _shell,
    "I": lambda _, __: {"interactive": True},
    "W": _attributes,
    "F": lambda value, _: {"args": value},
}
