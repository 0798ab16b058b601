"""Job shell adapter of Torque, OpenPBS and ``vtorque-local`` for ``qsub -S PROGRAM``.

PROGRAM reads one line from stdin, a pipe. The line contains the script's path and the ``-F``
arguments. In an OpenPBS sandbox, the line starts with ``cd DIRECTORY;``. In an interactive job,
stdin is the terminal, and for ``-x COMMAND`` Torque passes the arguments ``-c COMMAND``.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from vtorque_core.api import UsageError, name_errors
from vtorque_core.api.batch_system import JobShell, ShellStart

MAX_LINE = 1 << 20  # bytes of the line on stdin


class PbsJobShell(JobShell):
    """Implementation of :class:`vtorque_core.api.batch_system.JobShell` for PBS."""

    host_only = frozenset({"PBS_NODEFILE"})  # lists host nodes; the proof has the guests' file
    login = True  # pbs_mom starts "-bash" with the script's path on its standard input

    def read_start(
        self, argv: Sequence[str], environ: Mapping[str, str], stdin: int | None
    ) -> ShellStart:
        """Return the job's id and script. Raise UsageError if PBS did not start this process."""
        job_id = environ.get("PBS_JOBID", "")
        if not job_id:
            raise UsageError("PBS_JOBID is not set: only the batch system can start this program")
        if stdin is None:
            raise UsageError("standard input is missing, so there is no script")
        here = environ.get("PBS_O_INITDIR", "")
        if os.isatty(stdin):
            _disable_echo(stdin)
            command = argv[1] if len(argv) == 2 and argv[0] == "-c" else ""
            return ShellStart(job_id, None, cwd=here, command=command)
        line = _line(stdin)
        # Written by OpenPBS for -W sandbox=PRIVATE, unquoted (src/resmom/start_exec.c).
        sandbox = environ.get("PBS_JOBDIR", "")
        if sandbox and line.startswith(f"cd {sandbox};"):
            line, here = line.removeprefix(f"cd {sandbox};"), sandbox
        words = _words(line)
        return ShellStart(job_id, Path(words[0]), tuple(words[1:]), here)

    def content(self, script: bytes) -> bytes:
        """Return ``script`` unchanged."""
        return script

    def node_command(
        self, command: Sequence[str], environ: Mapping[str, str], nodes: Sequence[str] = ()
    ) -> list[str]:
        """Return a pbsdsh(1B) command that runs ``command`` once per host."""
        return ["pbsdsh", "-u", *command]


def _disable_echo(terminal: int) -> None:
    """Disable the echo of the user's terminal. The guest's terminal echoes all input."""
    import termios  # noqa: PLC0415 - interactive jobs only

    with contextlib.suppress(termios.error):
        settings = termios.tcgetattr(terminal)
        settings[3] &= ~termios.ECHO
        termios.tcsetattr(terminal, termios.TCSANOW, settings)


def _line(stdin: int) -> str:
    line = b""
    while chunk := os.read(stdin, 1 << 16):
        line += chunk
        if len(line) > MAX_LINE:
            raise UsageError(f"the script's path and arguments have more than {MAX_LINE} bytes")
    return os.fsdecode(line)


def _words(line: str) -> list[str]:
    with name_errors("invalid arguments of the script (-F)", ValueError, fault=UsageError):
        words = shlex.split(line)
    if not words:
        raise UsageError("the batch system did not provide a script on standard input")
    return words
