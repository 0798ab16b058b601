"""Exceptions and exit statuses of vTorque. Any other exception in a command is a bug."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

EXIT_OK = 0
EXIT_FAILED = 1  # a check or an action failed (doctor, reap, config check)
EXIT_USAGE = 2  # bad arguments or a refused request, nothing was created
EXIT_OUTPUT = 3  # the command succeeded, but standard output cannot be written
EXIT_NO_PROOF = 120  # the job shell found no proof of a ready guest and ran nothing
EXIT_REFUSED = 121  # the node refused the request; the reason is in the job's output
EXIT_HOST_FAULT = 122  # the node could not provide the guest
EXIT_GUEST_DIED = 123  # the guest ended while the script was running
EXIT_SIGNAL = 128  # plus the signal's number, as a shell reports it (POSIX sh, 2.8.2)

_NO_TEXT = re.compile(r"\\udc([89a-f][0-9a-f])")  # the error handler surrogateescape


@dataclass(frozen=True)
class Refusal:
    """Reason why a request is refused. Users get one line, or with ``--json`` the fields.

    ``where`` is the config key or file that sets ``limit``.
    """

    message: str
    key: str | None = None
    value: str | None = None
    limit: str | None = None
    where: str | None = None
    fix: str | None = None

    def __str__(self) -> str:
        subject = f"{self.key}={printable(self.value or '')}: " if self.key else ""
        line = subject + self.message
        if self.limit:
            line += f" (limit: {self.limit}"
            line += f", set by {self.where})" if self.where else ")"
        elif self.where:
            line += f" (set by {self.where})"
        return line + (f"; {self.fix}" if self.fix else "")


class VtorqueError(Exception):
    """Base of vTorque's exceptions. ``exit_code`` is the exit status of the command."""

    exit_code = EXIT_FAILED


class Refused(VtorqueError):
    """The request is invalid or violates the site's policy. The job is never retried.

    Args:
        refusals: the reasons. A string is the message of a new :class:`Refusal`.
        parts: other fields of a new Refusal.

    Attributes:
        detail: further printable lines for the user.
    """

    exit_code = EXIT_USAGE
    detail: tuple[str, ...] = ()

    def __init__(self, *refusals: Refusal | str, **parts: str | None) -> None:
        self.refusals = tuple(
            each if isinstance(each, Refusal) else Refusal(each, **parts) for each in refusals
        )
        super().__init__("; ".join(str(r) for r in self.refusals))


class HostFault(VtorqueError):
    """This node cannot run the job, but another node may.

    Attributes:
        detail: further printable lines for the user.
        blames_node: False if users can cause the fault. The node then still gets VM jobs.
    """

    exit_code = EXIT_HOST_FAULT
    blames_node = True

    def __init__(
        self, message: str, stage: str | None = None, detail: tuple[str, ...] = ()
    ) -> None:
        self.stage = stage
        self.detail = detail
        super().__init__(f"{stage}: {message}" if stage else message)


class InUse(HostFault):
    """The start can be retried: a resource is in use, or the start on another node has failed."""

    blames_node = False


class Conflict(VtorqueError):
    """Two plugins contradict each other. The message names both distributions."""


class ConfigError(VtorqueError):
    """The site config is invalid. The message has file, line and key."""

    exit_code = EXIT_USAGE


class UsageError(VtorqueError):
    """The command line is invalid."""

    exit_code = EXIT_USAGE


class OutputError(VtorqueError):
    """Standard output cannot be written. The message is empty after SIGPIPE, as with ``| head``."""

    def __init__(self, error: OSError) -> None:
        gone = isinstance(error, BrokenPipeError)
        self.exit_code = EXIT_SIGNAL + signal.SIGPIPE if gone else EXIT_OUTPUT
        super().__init__("" if gone else f"standard output: {error.strerror}")


def bytes_shown(text: str) -> str:
    r"""Return ``text`` with bytes that are not UTF-8 as ``\xff``, not as Python's ``\udcff``."""
    return _NO_TEXT.sub(r"\\x\1", text)


def printable(text: str, limit: int = 200) -> str:
    """Return ``text`` for terminals and logs: control characters escaped, length limited."""
    shown = text
    if not text.isprintable():  # escaping is 20 times slower; reports have 100,000 names
        shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
        shown = bytes_shown(shown)
    return shown if len(shown) <= limit else shown[:limit] + f"... ({len(text)} characters)"


def plugin_text(said: object, before: str = "") -> str:
    """Return a plugin's message or exception after ``before``, as one short printable line."""
    try:
        text = str(said)
    except Exception:  # an exception of a plugin may not even have a text
        text = "no message"
    return printable(before + text, 500)
