"""What puts a batch system's hooks in place on a node, and takes them back byte for byte.

Public: the node part of a batch system gives a list of steps, other plugins by the hook
``vtorque_setup_steps``. They run as root from ``vtorque setup install|uninstall``; ``vtorque
doctor`` asks each of a batch system whether it still holds.
"""

from __future__ import annotations

import enum
import hashlib
import os
import shlex
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from vtorque_core.base import safefs
from vtorque_core.base.errors import HostFault

KEPT = ".orig"

MARK = b"vTorque setup install"
"""What every file that :class:`ReplacedFile` writes contains, in a comment."""


@dataclass(frozen=True)
class Installation:
    """This installation of vTorque: how a hook calls it.

    Args:
        program: absolute path of the ``vtorque`` command.
        config: the site config.
        jobshell: the program that the batch system starts as the job's shell.
        start_time: seconds that a start may take at most, with the release of one that failed.
        end_time: seconds that the release of a job's guests may take at most.
        python: the interpreter beside ``program``; None: ``program`` is called by its name.
        grace: seconds from TERM to KILL of a job's script.
    """

    program: Path
    config: Path
    jobshell: Path
    start_time: float = 360.0
    end_time: float = 60.0
    python: Path | None = None
    grace: float = 10.0

    @property
    def command(self) -> tuple[str, ...]:
        """What a hook of root's executes, before the subcommand.

        In isolated mode (python(1), -I): no PYTHON* variable and no file where the hook happens to
        run takes part.
        """
        if self.python is None:
            return (str(self.program),)
        return (str(self.python), "-I", "-m", "vtorque_core.cli.vtorque")

    def call(self, command: str, *words: str) -> tuple[str, ...]:
        """Return how one of ``vtorque``'s commands is called: ``reap``, ``jobshell``."""
        return (*self.command, command, "--config", str(self.config), *words)

    def hook(self, *words: str) -> tuple[str, ...]:
        """Return how a hook of root's calls ``vtorque hook``; ``words``: ``prologue`` and so on."""
        return self.call("hook", *words)


@runtime_checkable
class SetupStep(Protocol):
    """One change of the node. Every method may be called at any time, as root."""

    @property
    def text(self) -> str:
        """What is done: ``write /etc/slurm/prolog.d/50-vtorque``."""

    def done(self) -> bool:
        """Whether it holds already; then it is not applied. Raises HostFault."""

    def apply(self) -> None:
        """Make it so. Raises HostFault."""

    def undo(self) -> None:
        """Restore what was before; nothing if it was not applied. Raises HostFault."""


@dataclass(frozen=True)
class Check:
    """A step that an admin has to do: it is looked at and never changed."""

    text: str
    problem: str
    """What is wrong, with what to do; empty: nothing."""

    def done(self) -> bool:
        """Return True if nothing is wrong."""
        return not self.problem

    def apply(self) -> None:
        """Refuse. Raises HostFault saying what to do."""
        raise HostFault(self.problem)

    def undo(self) -> None:
        """Do nothing."""


@dataclass(frozen=True)
class Change:
    """A step made of functions, each as :class:`SetupStep` says of it."""

    text: str
    done: Callable[[], bool]
    apply: Callable[[], None]
    undo: Callable[[], None]


class Mark(Change):
    """The step by which VM jobs come to this node, the last of all.

    ``vtorque doctor`` warns where it does not hold, and fails by the other steps: ``--mark`` gives
    it back when those hold.
    """


def long_enough(key: str, now: float, least: float, why: str) -> Check:
    """Return the check that a time limit in seconds, as the config has it, is not too short.

    ``key``: ``"[plugin.acme] alarm"``; ``why``: what takes that long.
    """
    problem = f"{key} is {now:g} s, but {why} may take {least:g} s: set it to {least:g} or more"
    return Check(f"{key} of at least {least:g} s", problem if now < least else "")


class _Whose(enum.Enum):
    """Whose the file at a path of ours is."""

    NOBODY = "nobody's"
    SITE = "the site's"
    OURS = "as vTorque wrote it"
    EDITED = "edited since vTorque wrote it"


@dataclass(frozen=True)
class ReplacedFile:
    """A root-owned file of ours; what was there before is kept beside it as ``NAME.orig``.

    A last line, a comment with the SHA-256 of all before it, is added to ``content``: so a file
    that an older vTorque wrote is told from one that somebody has edited, which is never written
    over or removed. ``#`` must begin a comment in it.
    """

    path: Path
    content: bytes
    mode: int = 0o755

    @property
    def kept(self) -> Path:
        """Where the site's own file is while ours is in place."""
        return self.path.with_name(self.path.name + KEPT)

    @property
    def text(self) -> str:
        """Say which file is written, and what becomes of the site's own."""
        if self._whose() is _Whose.SITE and not os.path.lexists(self.kept):
            return f"write {self.path}, keeping the site's as {self.kept.name}"
        return f"write {self.path}"

    def done(self) -> bool:
        """Return True if the file is there with this content and mode. Raises HostFault."""
        if self._read() != _sealed(self.content):
            return False
        status = self.path.lstat()
        return status.st_mode == stat.S_IFREG | self.mode and status.st_uid in (0, os.geteuid())

    def apply(self) -> None:
        """Put the file in place in one step; the site's own is never away for longer.

        Raises HostFault, with what to do, where an admin's edits would be lost.
        """
        whose = self._whose()
        if whose is _Whose.EDITED:
            raise HostFault(f"{self.path} was {whose.value}: move it away and run this again")
        with safefs.naming(self.path):
            make_directories(self.path.parent)
            if whose is _Whose.SITE and not self._kept_already():
                if os.path.lexists(self.kept):
                    raise HostFault(
                        f"{self.path} is not vTorque's, and {self.kept} exists: move one of them "
                        "away and run this again"
                    )
                os.link(self.path, self.kept, follow_symlinks=False)
            content = _sealed(self.content)
            safefs.replace(str(self.path), content, mode=self.mode, ready=os.fsync)

    def undo(self) -> None:
        """Put the site's own back, or remove ours.

        Raises HostFault, with what to do, and changes nothing if somebody has edited ours or put
        another file there meanwhile.
        """
        whose = self._whose()
        kept = os.path.lexists(self.kept)
        if whose is _Whose.EDITED or (whose is _Whose.SITE and kept and not self._kept_already()):
            what = "edited" if whose is _Whose.EDITED else "replaced"
            before = f"; the one from before vTorque is {self.kept}" if kept else ""
            raise HostFault(
                f"{self.path} was {what} since vTorque wrote it and is left as it is{before}: move "
                "it away and run this again"
            )
        with safefs.naming(self.path):
            safefs.remove_file(safefs.beside(str(self.path)))
            if whose is _Whose.SITE:  # an apply was stopped half way, or there was none
                if self._kept_already():
                    self.kept.unlink()
            elif kept:
                self.kept.replace(self.path)
            else:
                self.path.unlink(missing_ok=True)

    def _kept_already(self) -> bool:
        """Whether the site's file was linked to its other name, and ours is not there yet."""
        try:
            return os.path.samestat(self.path.lstat(), self.kept.lstat())
        except FileNotFoundError:
            return False

    def _whose(self) -> _Whose:
        if not os.path.lexists(self.path):
            return _Whose.NOBODY
        found = self._read()
        if found is None or MARK not in found:
            return _Whose.SITE
        body = found[: found.rindex(b"\n", 0, -1) + 1] if found.count(b"\n") > 1 else b""
        return _Whose.OURS if found == _sealed(body) else _Whose.EDITED

    def _read(self) -> bytes | None:
        """Return the content; None: missing, or a link. Raises HostFault."""
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
    """Return the step that writes a unit of systemd's; none on a machine that systemd does not run.

    Args:
        name: ``vtorque-acme.service``; the admin enables it.
        text: what is in it (systemd.unit(5)); command lines are :func:`unit_line`'s.
        units: where units of the site's are.
        booted: what is there where systemd runs.
    """
    if not booted.is_dir():
        return []
    first = f"# Written by {MARK.decode()}. To run it: systemctl daemon-reload; "
    content = f"{first}systemctl enable --now {name}\n{text}"
    return [ReplacedFile(units / name, content.encode(), mode=0o644)]


def unit_line(argv: Sequence[str]) -> str:
    """Return a command line of a unit, in which ``%`` and ``$`` have a meaning."""
    return shlex.join(argv).replace("%", "%%").replace("$", "$$")


def edit_file(
    path: Path, change: Callable[[bytes], bytes], *, may_be_missing: bool = False
) -> bool:
    """Change a file of the site's in one step, keeping its owner and mode; return if it changed.

    Args:
        path: the file; a link is followed.
        change: what becomes of its content.
        may_be_missing: a file without content is the same as none.

    Raises HostFault.
    """
    with safefs.naming(path):
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


def make_directories(directory: Path) -> None:
    """Make a directory and those above it that are missing, 0755 whatever the umask."""
    if not directory.exists():
        make_directories(directory.parent)
        directory.mkdir(exist_ok=True)
        directory.chmod(0o755)


def _sealed(content: bytes) -> bytes:
    body = content if content.endswith(b"\n") else content + b"\n"
    return body + b"# %s, sha256 %s\n" % (MARK, hashlib.sha256(body).hexdigest().encode())


def hook_script(*lines: str) -> bytes:
    """Return a hook of these lines of POSIX sh, marked as ours.

    The first should leave at once when the job is not a VM job, and start no process.
    """
    return "\n".join(("#!/bin/sh", f"# Written by {MARK.decode()}.", *lines, "")).encode()
