"""Start root's programs safely: with trusted code and a fixed environment."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from vtorque_core.base import errors
from vtorque_core.base.names import CONFIG_PATH

PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
UMASK = 0o077

# Variables for terminals, ssh (vtorque cluster), completion (click), and vTorque itself.
_KEPT = (
    "TERM", "COLUMNS", "LINES", "NO_COLOR", "SSH_AUTH_SOCK", "VTORQUE_TRACE", "_VTORQUE_COMPLETE",
    "COMP_WORDS", "COMP_CWORD",
)  # fmt: skip
# These commands reset their environment later or not at all: hooks first read the batch system's
# variables, and the job shell is a user's process.
OWN = ("hook", "jobshell")


def secure_process(module: str) -> None:
    """Make this process safe to run as root; no effect for other users.

    Call it before other imports. Executes ``module`` again in isolated mode, and sets a fixed
    environment and umask. Raises ConfigError if others can write the code.
    """
    if os.geteuid() != 0:
        return
    own = is_batch_call()
    if not sys.flags.isolated:
        _exec_isolated(module, dict(os.environ) if own else fixed_environ())
    from vtorque_core.base.trust import require_own_code  # noqa: PLC0415 - root's processes only

    require_own_code()
    if not own:
        reset_process(_KEPT)


def is_batch_call() -> bool:
    """Return True if a batch system called this process, as a hook or job shell."""
    return sys.argv[1:2] != [] and sys.argv[1] in OWN


def split_config(argv: Sequence[str]) -> tuple[Path, Sequence[str]]:
    """Return the file of ``--config``, if that is the first argument, and the other arguments."""
    option, joined, file = argv[0].partition("=") if argv else ("", "", "")
    if option != "--config":
        return CONFIG_PATH, argv
    if not joined:
        file, argv = "".join(argv[1:2]), argv[1:]
    if not file:
        raise errors.UsageError("--config needs a file")
    return Path(file), argv[1:]


@contextlib.contextmanager
def report_errors(program: str) -> Iterator[None]:
    """Report VtorqueError, OSError and interrupts in one line; exit with vTorque's exit status.

    SIGINT is unblocked only in the ``with`` block, because an interrupt while Python starts or
    exits would cause a traceback.
    """
    open_streams()
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))
            yield
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            sys.stdout.flush()  # an error of Python's own flush at exit would cause a traceback
        return
    except errors.VtorqueError as error:
        message, code = str(error), error.exit_code
    except KeyboardInterrupt:
        message, code = "interrupted", errors.EXIT_SIGNAL + signal.SIGINT
    except BrokenPipeError:
        message, code = "", errors.EXIT_SIGNAL + signal.SIGPIPE
    except OSError as error:
        place = f"{errors.printable(str(error.filename))}: " if error.filename is not None else ""
        message, code = f"{place}{error.strerror or error}", errors.EXIT_FAILED
        try:
            os.getcwd()  # noqa: PTH109
        except FileNotFoundError:
            message = "the current directory has been removed: change to another one"
            code = errors.EXIT_USAGE
    if message:
        shown = "\n".join(errors.printable(line, len(line)) for line in message.split("\n"))
        sys.stderr.write(f"{program}: {shown}\n")
    sys.exit(code)


class _Stream(io.TextIOWrapper):
    """Standard output or standard error that handles failed writes.

    A failed write to standard output raises OutputError, except in hooks and job shells. A failed
    write to standard error is ignored.
    """

    def write(self, text: str) -> int:
        with self._guard():
            if self.fileno() == 2:  # click's messages quote words of the user
                text = errors.bytes_shown(text.encode("utf-8", "backslashreplace").decode())
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with self._guard():
            super().flush()

    @contextlib.contextmanager
    def _guard(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            with Path(os.devnull).open("wb") as null:  # for data that is still buffered
                os.dup2(null.fileno(), self.fileno())
            if self.fileno() == 1 and not is_batch_call():
                raise errors.OutputError(error) from None


def open_streams() -> None:
    """Open closed standard streams, also for children, and write through :class:`_Stream`.

    Otherwise the next opened file would become a standard stream.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            mode = os.O_RDWR if is_batch_call() else os.O_RDONLY if number else os.O_WRONLY
            os.set_inheritable(os.open(os.devnull, mode), True)  # the lowest number, open(2)
        stream = getattr(sys, name)
        if not number:
            sys.stdin = stream or os.fdopen(0, errors="replace", closefd=False)
        elif not isinstance(stream, _Stream):
            file = os.fdopen(number, "wb", closefd=False)
            by_line = number == 2 or file.isatty()
            coding = stream and stream.encoding
            setattr(sys, name, _Stream(file, coding, "backslashreplace", line_buffering=by_line))


def forget_coerced_locale() -> None:
    """Remove the LC_CTYPE that Python sets in the C locale (PEP 538). Jobs must not inherit it."""
    given = Path("/proc/self/environ").read_bytes().split(b"\0")
    if not any(each.startswith(b"LC_CTYPE=") for each in given):
        os.environ.pop("LC_CTYPE", None)


def fixed_environ(kept: Iterable[str] = _KEPT) -> dict[str, str]:
    if os.geteuid() != 0:
        from vtorque_core.config.personal import VARIABLES  # noqa: PLC0415 - not root's

        kept = (*kept, *VARIABLES)
    own = {name: os.environ[name] for name in kept if name in os.environ}
    return {"PATH": PATH, "LC_ALL": "C.UTF-8", "HOME": "/root"} | own


def reset_process(kept: Iterable[str] = ()) -> None:
    """Set a fixed environment (except ``kept``) and umask, and unblock all signals.

    Variables of the caller would affect libraries. OpenPBS runs hooks with blocked signals, which
    daemons would inherit.
    """
    fixed = fixed_environ(kept)
    os.environ.clear()
    os.environ.update(fixed)
    os.umask(UMASK)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _exec_isolated(module: str, environ: dict[str, str]) -> NoReturn:
    sys.stdout.flush()
    argv = [sys.executable, "-I", "-m", module, *sys.argv[1:]]
    os.execve(argv[0], argv, environ)  # noqa: S606
