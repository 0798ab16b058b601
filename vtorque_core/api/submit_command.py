"""Become the site's own submit command, so that what it does is unchanged. Public; as the user."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from vtorque_core.base.errors import UsageError


def become(argv: Sequence[str], stdin: bytes | None = None) -> NoReturn:
    """Replace this process by a command: terminal, signals, output and exit code are its own.

    Args:
        argv: the command, its program as an absolute path.
        stdin: what it reads on standard input; None: what this process has there.

    Raises UsageError if the program cannot be started.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    if stdin is not None:
        source = os.memfd_create("script")
        with os.fdopen(os.dup(source), "wb") as file:
            file.write(stdin)
        os.lseek(source, 0, os.SEEK_SET)
        os.dup2(source, 0)
    for name in ("SIGPIPE", "SIGXFSZ"):  # Python ignores them, and that would be inherited
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    given = Path("/proc/self/environ").read_bytes()
    if b"\0LC_CTYPE=" not in b"\0" + given:  # Python has put its own there (PEP 538)
        os.environ.pop("LC_CTYPE", None)
    try:
        os.execv(argv[0], list(argv))  # noqa: S606
    except OSError as error:
        raise UsageError(f"{argv[0]}: {error.strerror}") from None
