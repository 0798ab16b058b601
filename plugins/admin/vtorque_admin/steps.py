"""Steps of ``vtorque setup``: install a file, edit a site's file, write a systemd unit. As root."""

from __future__ import annotations

import enum
import hashlib
import os
import shlex
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from vtorque_core.api import HostFault
from vtorque_core.api.setup_steps import safefs

KEPT = ".orig"

MARK = b"vTorque setup install"
"""Text in a comment of every file that :class:`ReplacedFile` writes."""


@dataclass(frozen=True)
class Check:
    """A step that the admin must do, and that ``setup`` only checks."""

    text: str
    problem: str
    """The problem and its solution; empty if there is no problem."""

    def is_applied(self) -> bool:
        """Return True if ``problem`` is empty."""
        return not self.problem

    def apply(self) -> None:
        """Raise HostFault with ``problem``, because only the admin can do this step."""
        raise HostFault(self.problem)

    def undo(self) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class Change:
    """A setup step whose methods are given as functions; see :class:`SetupStep`."""

    text: str
    is_applied: Callable[[], bool]
    apply: Callable[[], None]
    undo: Callable[[], None]


class Mark(Change):
    """The last step: set this node's mark, which VM jobs request."""


def check_timeout(key: str, now: float, least: float, why: str) -> Check:
    """Return a check that a time limit of the site is long enough.

    ``key`` is the setting (``"[plugin.acme] alarm"``), ``now`` its value and ``least`` its minimum,
    in seconds. ``why`` says what takes that long.
    """
    problem = f"{key} is {now:g} s, but {why} may take {least:g} s: set it to {least:g} or more"
    return Check(f"{key} of at least {least:g} s", problem if now < least else "")


class _Owner(enum.Enum):
    NOBODY = "nobody's"
    SITE = "the site's"
    OURS = "as vTorque wrote it"
    EDITED = "edited since vTorque wrote it"


@dataclass(frozen=True)
class ReplacedFile:
    """A root-owned file that vTorque installs. The previous file is kept as ``NAME.orig``.

    vTorque appends a ``#`` comment with the SHA-256 of the content. It never overwrites or removes
    a file that was edited after the installation.
    """

    path: Path
    content: bytes
    mode: int = 0o755

    @property
    def backup(self) -> Path:
        """Path of the site's own file after vTorque's file has replaced it."""
        return self.path.with_name(self.path.name + KEPT)

    @property
    def text(self) -> str:
        """Description of the change."""
        if self._owner() is _Owner.SITE and not os.path.lexists(self.backup):
            return f"write {self.path}, keeping the site's as {self.backup.name}"
        return f"write {self.path}"

    def is_applied(self) -> bool:
        """Return True if the file has this content and mode."""
        if self._read() != _add_seal(self.content):
            return False
        status = self.path.lstat()
        return status.st_mode == stat.S_IFREG | self.mode and status.st_uid in (0, os.geteuid())

    def apply(self) -> None:
        """Install the file atomically. Raises HostFault if an admin's edits would be lost."""
        state = self._owner()
        if state is _Owner.EDITED:
            raise HostFault(
                f"{self.path} was {state.value}: move it away and run this command again"
            )
        with safefs.name_errors(self.path):
            safefs.make_directories(self.path.parent)
            if state is _Owner.SITE and not self._has_backup():
                if os.path.lexists(self.backup):
                    raise HostFault(
                        f"{self.path} was not written by vTorque, and {self.backup} "
                        "exists: move one of them away, then run this command again"
                    )
                os.link(self.path, self.backup, follow_symlinks=False)
            content = _add_seal(self.content)
            safefs.replace(str(self.path), content, mode=self.mode, ready=os.fsync)

    def undo(self) -> None:
        """Restore the site's own file, or remove vTorque's file.

        Raises HostFault if the file was edited or replaced.
        """
        state = self._owner()
        kept = os.path.lexists(self.backup)
        if state is _Owner.EDITED or (state is _Owner.SITE and kept and not self._has_backup()):
            what = "edited" if state is _Owner.EDITED else "replaced"
            before = f" (the file from before vTorque is {self.backup})" if kept else ""
            raise HostFault(
                f"{self.path} was {what} since vTorque wrote it, so the setup was not "
                f"undone{before}: move it away, then run this command again"
            )
        with safefs.name_errors(self.path):
            safefs.remove_file(safefs.temporary_name(str(self.path)))
            if state is _Owner.SITE:  # apply() was interrupted, or never called
                if self._has_backup():
                    self.backup.unlink()
            elif kept:
                self.backup.replace(self.path)
            else:
                self.path.unlink(missing_ok=True)

    def _has_backup(self) -> bool:
        try:
            return os.path.samestat(self.path.lstat(), self.backup.lstat())
        except FileNotFoundError:
            return False

    def _owner(self) -> _Owner:
        if not os.path.lexists(self.path):
            return _Owner.NOBODY
        found = self._read()
        if found is None or MARK not in found:
            return _Owner.SITE
        body = found[: found.rindex(b"\n", 0, -1) + 1] if found.count(b"\n") > 1 else b""
        return _Owner.OURS if found == _add_seal(body) else _Owner.EDITED

    def _read(self) -> bytes | None:
        try:
            return None if self.path.is_symlink() else self.path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise HostFault(f"{self.path}: {error.strerror}: move it away") from None


_BOOTED = Path("/run/systemd/system")  # sd_booted(3)
_UNITS = Path("/etc/systemd/system")


def systemd_unit(
    name: str, text: str, *, units: Path = _UNITS, booted: Path = _BOOTED
) -> list[ReplacedFile]:
    """Return one step, which writes a systemd unit, or no step if systemd does not run.

    The admin enables the unit. Build command lines in ``text`` with :func:`unit_line`.
    """
    if not booted.is_dir():
        return []
    first = f"# Written by {MARK.decode()}. To run it: systemctl daemon-reload; "
    content = f"{first}systemctl enable --now {name}\n{text}"
    return [ReplacedFile(units / name, content.encode(), mode=0o644)]


def unit_line(argv: Sequence[str]) -> str:
    """Return a command line for a unit, with ``%`` and ``$`` escaped."""
    return shlex.join(argv).replace("%", "%%").replace("$", "$$")


def edit_file(
    path: Path, change: Callable[[bytes], bytes], *, may_be_missing: bool = False
) -> bool:
    """Edit a file of the site atomically; return True if its content changed.

    Keeps owner and mode, and follows links. Raises HostFault if the file cannot be read or written.
    """
    with safefs.name_errors(path):
        target = path.resolve()
        there = target.exists() or not may_be_missing
        before = target.read_bytes() if there else b""
        after = change(before)
        if after == before:
            return False
        if may_be_missing and not after:
            target.unlink()
        else:
            safefs.rewrite(target, after)
    return True


def _add_seal(content: bytes) -> bytes:
    body = content if content.endswith(b"\n") else content + b"\n"
    return body + b"# %s, sha256 %s\n" % (MARK, hashlib.sha256(body).hexdigest().encode())


def hook_script(*lines: str) -> bytes:
    """Return a POSIX sh hook script of these lines, with a comment that vTorque wrote it.

    The first of ``lines`` should end the script if the job is not a VM job.
    """
    return "\n".join(("#!/bin/sh", f"# Written by {MARK.decode()}.", *lines, "")).encode()
