"""First program in a job's process: open the output files and execute the job.

``python -I -S become_job.py ORDER REST``, as the user. Both arguments are descriptors of JSON
files: ORDER has the values from the service (``LocalJob.order``), REST the values from the client's
process (:mod:`vtorque_local.client`). After an error, the program prints one line on stderr and
exits with status 1. If its parent has ended, the program exits. This module imports little, because
imports delay every job.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence


def command(order: int, rest: int) -> list[str]:
    """Return a command that starts this program with the two descriptors as arguments."""
    return [sys.executable, "-I", "-S", __file__, str(order), str(rest)]


def start(
    environ: dict[str, str],
    *,
    wrapper: Sequence[str],
    directory: str,
    line: str,
    outputs: Sequence[tuple[str, str]],
) -> None:
    """Execute the job in this process.

    Args:
        environ: The complete environment.
        wrapper: The job shell; empty on bare metal, where the user's shell runs the job.
        directory: Working directory; empty for the home directory. It may exist only in the guest.
        line: Content of standard input, as Torque's pbs_mom sends it; empty to keep a terminal.
        outputs: Arguments of :func:`open_output` for stdout and stderr; empty to keep both.
    """
    argv, name = wrapper, ""
    if not argv:  # "-bash" is a login shell, login(1)
        argv, name = [environ["SHELL"]], "-" + os.path.basename(environ["SHELL"])  # noqa: PTH119
    try:
        os.chdir(directory or environ["HOME"])
    except OSError:
        if not (directory and wrapper):
            raise
    if line:
        _give_line(line)
    files = [open_output(*output, os.O_TRUNC) for output in outputs]
    for target, source in enumerate(files, 1):
        os.dup2(source, target)
    # Restore signals that Python or the caller (nohup) ignores: execve(2) would keep that.
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_DFL)
    os.execve(argv[0], [name or argv[0], *argv[1:]], environ)  # noqa: S606


def _give_line(line: str) -> None:
    given, give = os.pipe()
    os.write(give, os.fsencode(line))
    os.close(give)
    os.dup2(given, 0)


def open_output(path: str, name: str, flags: int = 0) -> int:
    """Open an output file for appending. If ``path`` is a directory, open ``name`` in it.

    Never blocks: a FIFO without a reader raises OSError. Never follows a link to a file: an earlier
    guest that shares the directory could have made a link to any file of the user.
    """
    if os.path.isdir(path):  # noqa: PTH112 (the user's text, kept as it is)
        path = os.path.join(path, name)  # noqa: PTH118
    flags |= os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY
    flags |= os.O_NOFOLLOW
    descriptor = os.open(path, flags, 0o666)
    os.set_blocking(descriptor, True)
    return descriptor


def note(path: str, name: str, text: str) -> None:
    """Append a line to an output file; see :func:`open_output`."""
    os.write(open_output(path, name), text.encode("utf-8", "replace"))


def has_task(path: str) -> bool:
    """Return whether an array task's output file has the task's suffix, as in Torque."""
    return path != os.devnull and not os.path.isdir(path)  # noqa: PTH112


def main(argv: Sequence[str]) -> None:
    """Read the job's description from the descriptors ORDER and REST, and execute the job.

    If ORDER has a ``text``, append the text to the job's stderr, and do not execute the job.
    """
    files = [int(number) for number in argv]
    # Use pread(2), because other processes share the file offset.
    order, rest = (json.loads(os.pread(file, os.fstat(file).st_size, 0)) for file in files)
    if os.getppid() != order["starter"]:
        sys.exit("its starter has ended")
    outputs = [
        (path + order["task"] if has_task(path) else path, order["names"][number])
        for path, number in rest["outputs"]
    ]
    if order["text"]:
        note(*outputs[1], order["text"])
        return
    for file in files:
        os.close(file)
    line = order["line"] and f"{order['line']} {rest['args']}".rstrip() + "\n"
    start(
        rest["environ"] | order["environ"] | ({"SHELL": rest["shell"]} if rest["shell"] else {}),
        wrapper=order["wrapper"],
        directory=rest["directory"],
        line=line,
        outputs=outputs if line else (),
    )


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except OSError as error:
        sys.exit(f"{error.filename}: {error.strerror}")
    except ValueError as error:  # e.g. an invalid environment
        sys.exit(str(error))
