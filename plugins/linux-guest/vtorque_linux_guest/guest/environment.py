"""Shell text that exports environment variables in a guest."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping

from vtorque_core.api import HostFault

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)

# Variables that belong to a login session or to the shell itself, not to the job.
_SESSION = frozenset(
    {
        *("HOME", "USER", "LOGNAME", "SHELL", "MAIL", "PATH", "PWD", "OLDPWD", "TERM", "TMOUT"),
        *("DISPLAY", "XAUTHORITY", "IFS", "PS1", "PS2", "PS4", "OPTIND", "ENV", "BASH_ENV", "_"),
        *("SHLVL", "UID", "EUID", "PPID", "GROUPS", "SHELLOPTS", "BASHOPTS", "BASH_VERSINFO"),
        "POSIXLY_CORRECT",
    }
)


def job_environment_text(variables: Mapping[str, str]) -> str:
    """Return shell lines that export the job's variables for its user's login shells.

    Omits names that are not identifiers (``BASH_FUNC_x%%``) or belong to a login session.
    """
    return environment_text(
        {n: value for n, value in variables.items() if is_of_job(n) and "\0" not in value}
    )


def is_of_job(name: str) -> bool:
    """Return whether :func:`job_environment_text` includes a variable of this name."""
    return _NAME.fullmatch(name) is not None and name not in _SESSION


def environment_text(variables: Mapping[str, str]) -> str:
    """Return shell lines that export variables with exactly these values.

    Raises HostFault for a name that is not an identifier (POSIX, 3.216 Name).
    """
    for name, value in variables.items():
        if not _NAME.fullmatch(name) or "\0" in value:
            raise HostFault(f"{name!r} cannot be an environment variable in a guest")
    return "".join(
        f"export {name}={shlex.quote(value)}\n" for name, value in sorted(variables.items())
    )
