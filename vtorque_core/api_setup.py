"""What puts a batch system's hooks in place on a node, and takes them back byte for byte.

Public: the node part of a batch system gives a list of steps. They run as root from ``vtorque setup
install|uninstall``; ``vtorque doctor`` asks each whether it still holds.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from vtorque_core.errors import HostFault

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
    """

    program: Path
    config: Path
    jobshell: Path


class SetupStep(Protocol):
    """One change of the node. Every method may be called at any time, as root."""

    @property
    def text(self) -> str:
        """What is done: ``write /etc/slurm/prolog.d/50-vtorque``."""
        ...

    def done(self) -> bool:
        """Whether it holds already; then it is not applied. Raises HostFault."""
        ...

    def apply(self) -> None:
        """Make it so. Raises HostFault."""
        ...

    def undo(self) -> None:
        """Restore what was before; nothing if it was not applied. Raises HostFault."""
        ...


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
class ReplacedFile:
    """A root-owned file of ours; what was there before is kept beside it as ``NAME.orig``."""

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
        keeping = f", keeping the site's as {self.kept.name}" if self._site_has_one() else ""
        return f"write {self.path}{keeping}"

    def done(self) -> bool:
        """Return True if the file is there with this content and mode."""
        try:
            status = self.path.lstat()
            return (status.st_mode & 0o7777, status.st_uid, self.path.read_bytes()) == (
                self.mode,
                0,
                self.content,
            )
        except FileNotFoundError:
            return False

    def apply(self) -> None:
        """Put the file in place in one step; the site's own is never away for longer."""
        try:
            self.path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
            if self._site_has_one():
                os.link(self.path, self.kept, follow_symlinks=False)
            new = self.path.with_name(f".{self.path.name}.vtorque-new")
            new.unlink(missing_ok=True)
            descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                file.write(self.content)
                os.fchmod(descriptor, self.mode)
                os.fsync(descriptor)
            new.replace(self.path)
        except OSError as error:
            raise HostFault(f"{self.path}: {error.strerror}") from None

    def undo(self) -> None:
        """Put the site's own back, or remove ours."""
        try:
            if os.path.lexists(self.kept):
                self.kept.replace(self.path)
            elif self._is_ours():
                self.path.unlink()
        except OSError as error:
            raise HostFault(f"{self.path}: {error.strerror}") from None

    def _site_has_one(self) -> bool:
        return os.path.lexists(self.path) and not os.path.lexists(self.kept) and not self._is_ours()

    def _is_ours(self) -> bool:
        try:
            return MARK in self.path.read_bytes()
        except FileNotFoundError:
            return False


def hook_script(place: Installation, words: Sequence[str], guard: str) -> bytes:
    """Return a hook of a few lines of POSIX sh that leaves at once when the job is not ours.

    Args:
        place: how to call vTorque.
        words: the subcommand: ``("hook", "prologue")``.
        guard: shell commands that ``exit 0`` when the job is not a VM job; they start no process.
    """
    group, *rest = words
    argv = [str(place.program), group, "--config", str(place.config), *rest]
    lines = ("#!/bin/sh", f"# Written by {MARK.decode()}.", guard, f'exec {shlex.join(argv)} "$@"')
    return ("\n".join(lines) + "\n").encode()
