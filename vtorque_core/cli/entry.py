"""How root's programs begin: by their own code alone, and with nothing of their caller's."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NoReturn

from vtorque_core.base.errors import EXIT_SIGNAL, VtorqueError

PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
UMASK = 0o077

# What a terminal, ssh (vtorque cluster) and completion (click) need, and vTorque's own.
_KEPT = (
    "TERM", "COLUMNS", "LINES", "NO_COLOR", "SSH_AUTH_SOCK", "VTORQUE_TRACE", "_VTORQUE_COMPLETE",
    "COMP_WORDS", "COMP_CWORD",
)  # fmt: skip
# They see to their environment themselves: hooks read the batch system's variables in it before
# they drop it, and the job's shell is a user's process.
OWN = ("hook", "jobshell")


def begin(module: str) -> None:
    """Make this process fit to be root's; nothing happens for other users.

    Python's isolated mode (python(1), -I), code that root alone can write, a fixed environment and
    umask. Called before anything is imported that a command needs. ``module`` is run anew if the
    process is not isolated. Raises ConfigError naming a path that others can write.
    """
    open_streams()
    if os.geteuid() != 0:
        return
    own = sys.argv[1:2] and sys.argv[1] in OWN
    if not sys.flags.isolated:
        _again(module, dict(os.environ) if own else clean())
    from vtorque_core.base.trust import require_own_code  # noqa: PLC0415 - root's processes only

    require_own_code()
    if not own:
        become_clean(_KEPT)


@contextlib.contextmanager
def telling(program: str) -> Iterator[None]:
    """End the process with one line and vTorque's exit code on an error of ours or an interrupt.

    For commands of any user's and for root's hooks alike. Who reads no more is told nothing.
    """
    try:
        yield
    except VtorqueError as error:
        sys.stderr.write(f"{program}: {error}\n")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.stderr.write(f"{program}: interrupted\n")
        sys.exit(EXIT_SIGNAL + signal.SIGINT)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        sys.exit(EXIT_SIGNAL + signal.SIGPIPE)


def open_streams() -> None:
    """Open to nothing what of the standard streams is closed, for this process and its children.

    Torque runs the sisters' epilogue.parallel without outputs where it cannot open the job's;
    Python then has None for them, and the next file opened is taken for one.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number, open(2)
        if getattr(sys, name) is None:
            stream = os.fdopen(number, "w" if number else "r", errors="replace", closefd=False)
            setattr(sys, name, stream)


def forget_coerced_locale() -> None:
    """Take out of the environment the LC_CTYPE that Python itself sets in the C locale (PEP 538).

    For programs whose environment becomes a job's: proc_pid_environ(5) has what they were given.
    """
    given = Path("/proc/self/environ").read_bytes().split(b"\0")
    if not any(each.startswith(b"LC_CTYPE=") for each in given):
        os.environ.pop("LC_CTYPE", None)


def clean(kept: Iterable[str] = _KEPT) -> dict[str, str]:
    """Return a fixed environment, with those of ``kept`` that are set in the present one."""
    if os.geteuid() != 0:
        from vtorque_core.site.personal import VARIABLES  # noqa: PLC0415 - not root's

        kept = (*kept, *VARIABLES)
    own = {name: os.environ[name] for name in kept if name in os.environ}
    return {"PATH": PATH, "LC_ALL": "C.UTF-8", "HOME": "/root"} | own


def become_clean(kept: Iterable[str] = ()) -> None:
    """Set a fixed umask, an empty signal mask, and a fixed environment except for ``kept``.

    Callers may pass on variables of others, and libraries obey some of these: libvirt writes the
    file that LIBVIRT_LOG_OUTPUTS names. OpenPBS's pbs_mom runs hooks with its signals
    blocked (``allsigs`` in mom_main.c). Daemons inherit the signal mask from the hook that starts
    them, and would not end on SIGTERM.
    """
    fixed = clean(kept)
    os.environ.clear()
    os.environ.update(fixed)
    os.umask(UMASK)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _again(module: str, environ: dict[str, str]) -> NoReturn:
    sys.stdout.flush()
    argv = [sys.executable, "-I", "-m", module, *sys.argv[1:]]
    os.execve(argv[0], argv, environ)  # noqa: S606
