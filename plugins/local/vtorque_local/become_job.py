"""The first program in a job's process: opens the output files and becomes the job.

``python -I -S become_job.py ORDER REST``, as the user; both are descriptors: what root says of the
job (:meth:`vtorque_local.job.Job.order`) and what the user's client has left of it
(:mod:`vtorque_local.client`). What goes wrong is one line on stderr and exit code 1. It does
nothing if the process that started it has ended: nobody would end the job. Every job waits for its
imports.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Sequence


def command(order: int, rest: int) -> list[str]:
    """Return the command that becomes the job, or notes why it ended."""
    return [sys.executable, "-I", "-S", __file__, str(order), str(rest)]


def start(
    environ: dict[str, str],
    *,
    wrapper: Sequence[str],
    directory: str,
    line: str,
    outputs: Sequence[tuple[str, str]],
) -> None:
    """Become the job in this process. Raises OSError, ValueError (what exec cannot take).

    Args:
        environ: its environment, all of it.
        wrapper: what runs it; none: it is on bare metal, and the user's shell does.
        directory: where it is to run, empty: at home. In a guest it may be missing here.
        line: what Torque's pbs_mom has on standard input; empty: that is a terminal.
        outputs: stdout and stderr, see :func:`open_output`; none: leave them.
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
    # What Python or our starter (nohup) ignores: exec keeps that.
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_DFL)
    os.execve(argv[0], [name or argv[0], *argv[1:]], environ)  # noqa: S606


def _give_line(line: str) -> None:
    """Have it on standard input, as Torque's pbs_mom does."""
    given, give = os.pipe()
    os.write(give, os.fsencode(line))
    os.close(give)
    os.dup2(given, 0)


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


def main(argv: Sequence[str]) -> None:
    """Start the job, or note ``text`` at its end."""
    files = [int(number) for number in argv]
    # The offset is shared with others that read it.
    order, rest = (json.loads(os.pread(file, os.fstat(file).st_size, 0)) for file in files)
    if os.getppid() != order["starter"]:
        sys.exit("its starter has ended")
    outputs = [
        (path if os.path.isdir(path) else path + order["task"], order["names"][number])  # noqa: PTH112
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
    except ValueError as error:  # the user's environment, for one
        sys.exit(str(error))
