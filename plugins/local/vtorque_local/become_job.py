"""The first program in a job's process: opens the output files and becomes the job.

``python -I -S become_job.py JSON``, started by ``mom`` as the user, with the job's environment,
umask and standard input. What goes wrong is one line on stderr and exit code 1. It does nothing if
the process that started it has ended: nobody would end the job. Every job waits for its imports.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence


def start(
    argv: Sequence[str],
    name: str,
    *,
    directory: str,
    needed: bool,
    outputs: Sequence[tuple[str, str]],
) -> None:
    """Become ``argv`` in this process. Raises OSError.

    Args:
        name: what the program gets as its own name; ``-bash`` is a login shell (login(1)).
        directory: the working directory; if it is not ``needed`` it may be missing.
        outputs: stdout and stderr, see :func:`open_output`; none: leave them.
    """
    try:
        os.chdir(directory)
    except OSError:
        if needed:
            raise
    files = [open_output(*output, os.O_TRUNC) for output in outputs]
    for target, source in enumerate(files, 1):
        os.dup2(source, target)
    # What Python or our starter (nohup) ignores: exec keeps that.
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_DFL)
    # As it was given: Python has put its own LC_CTYPE into os.environ (PEP 538).
    with open("/proc/self/environ", "rb") as file:  # noqa: PTH123 - pathlib takes 5 ms
        given = file.read().split(b"\0")[:-1]
    os.execve(argv[0], [name, *argv[1:]], dict(item.split(b"=", 1) for item in given))  # noqa: S606


def open_output(path: str, name: str, flags: int = 0) -> int:
    """Open an output file to append; a directory gets the file ``name``. Raises OSError.

    Never waits: a FIFO needs a reader by now.
    """
    if os.path.isdir(path):  # noqa: PTH112 (the user's text, kept as it is)
        path = os.path.join(path, name)  # noqa: PTH118
    flags |= os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY
    descriptor = os.open(path, flags, 0o666)
    os.set_blocking(descriptor, True)
    return descriptor


def note(path: str, name: str, text: str) -> None:
    """Append a line to an output file. Raises OSError."""
    os.write(open_output(path, name), text.encode("utf-8", "replace"))


if __name__ == "__main__":
    try:
        given = json.loads(sys.argv[1])
        if os.getppid() != given.pop("starter"):
            sys.exit("its starter has ended")
        if "text" in given:
            note(**given)
        else:
            start(**given)
    except OSError as error:
        sys.exit(f"{error.filename}: {error.strerror}")
