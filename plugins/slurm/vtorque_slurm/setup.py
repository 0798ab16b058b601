"""``vtorque setup install --batch slurm``: our Prolog and Epilog beside the site's own.

slurm.conf names one program or a glob. Where it is a glob ours is put into that directory; where it
is a program, or nothing, it becomes a glob of a directory with ours and a link to the site's. Slurm
runs them in reverse alphabetical order: slurm.conf(5), Prolog.
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from vtorque_core.api import HostFault
from vtorque_core.api_setup import (
    MARK,
    Check,
    Installation,
    ReplacedFile,
    SetupStep,
    long_enough,
    make_directories,
)
from vtorque_slurm import conf, outcome
from vtorque_slurm.client import Client
from vtorque_slurm.conf import ConfLine
from vtorque_slurm.settings import Settings

OURS = "50-vtorque"
_SITES = {"Prolog": "90-site", "Epilog": "10-site"}  # the site's comes first, and ends last
_UNLIMITED = 65534  # PrologEpilogTimeout's default: none, slurm.conf(5)


def steps(settings: Settings, place: Installation, journal: Path, proofs: Path) -> list[SetupStep]:
    """Return the steps on this node, in order. Raises HostFault without a slurm.conf."""
    path = Path(settings.conf)
    hooks = {"Prolog": prolog(place), "Epilog": epilog(place, journal, proofs)}
    found: list[SetupStep] = []
    for key, content in hooks.items():
        found += _hook(path, key, content)
    limit = settings.prolog_time
    found.append(long_enough("[plugin.slurm] prolog_time", limit, place.start_time, "a start"))
    found += _checks(settings, path)
    if settings.feature:
        found.append(Feature(settings.feature, Client(settings)))
    return found


def prolog(place: Installation) -> bytes:
    """Return the Prolog. It never fails: Slurm would drain the node.

    What a killed prologue has left is released at once; the job shell then finds no proof.
    """
    guard = "case $SLURM_JOB_COMMENT in *vt1:*) ;; *) exit 0 ;; esac"
    release = f'{_call(place, "epilogue")} "$SLURM_JOB_ID"'
    return _script(guard, f"{_call(place, 'prologue')} || {release}", "exit 0")


def epilog(place: Installation, journal: Path, proofs: Path) -> bytes:
    """Return the Epilog: it looks for what a job has left here, whatever its comment says now.

    It never fails either; what could not be released the reaper tries again.
    """
    journals = f'{shlex.quote(str(journal))}/"$SLURM_JOB_ID".*.jsonl'
    proof = f'{shlex.quote(str(proofs))}/"$SLURM_JOB_ID".json'
    return _script(
        f"for file in {journals} {proof}; do",
        '  [ -e "$file" ] || continue',
        f'  {_call(place, "epilogue")} "$SLURM_JOB_ID"',
        "  exit 0",
        "done",
        "exit 0",
    )


def _script(*lines: str) -> bytes:
    return "\n".join(("#!/bin/sh", f"# Written by {MARK.decode()}.", *lines, "")).encode()


def _call(place: Installation, hook: str) -> str:
    return shlex.join([*place.command, "hook", "--config", str(place.config), hook])


def _hook(path: Path, key: str, content: bytes) -> Iterator[SetupStep]:
    """Yield the steps that put one hook in place."""
    own = path.parent / "vtorque" / f"{key.lower()}.d"
    now = conf.value(path, key)
    if re.search(r"[*?\[]", now) and not now.startswith(f"{own}/"):
        directory, pattern = Path(now).parent, Path(now).name
        name = _name_in(directory, pattern)
        if name is None or "*" in str(directory):
            problem = f"{key}={now} matches no file name of ours: let it end with /*"
            yield Check(f"{key} of {path}", problem)
        else:
            yield ReplacedFile(directory / name, content)
        return
    yield Folder(own.parent)
    yield Folder(own)
    yield ReplacedFile(own / OURS, content)
    if now and not now.startswith(f"{own}/"):
        yield Link(own / _SITES[key], Path(now))
    elif now and os.path.lexists(own / _SITES[key]):
        yield Link(own / _SITES[key], (own / _SITES[key]).readlink())
    yield ConfLine(path, key, f"{own}/*")


def _name_in(directory: Path, pattern: str) -> str | None:
    """Return the name of our file among the site's: the one it has, else a free one.

    Never one of the site's, which would be kept beside it: Slurm would run that too, or no longer
    run it, as the pattern is (glob(7): only names with a leading dot do not match ``*``).
    """
    names = (f"{n}-vtorque{end}" for n in range(50, 60) for end in ("", ".sh"))
    fitting = [name for name in names if fnmatch.fnmatchcase(name, pattern)]
    with contextlib.suppress(OSError):
        there = {each.name: each for each in directory.iterdir()}
        files = [n for n in fitting if n in there and there[n].is_file()]
        ours = [n for n in files if MARK in there[n].read_bytes()]
        fitting = ours or [n for n in fitting if n not in there]
    return fitting[0] if fitting else None


@dataclass(frozen=True)
class Folder:
    """A setup step: a directory of ours."""

    path: Path

    @property
    def text(self) -> str:
        """Say which directory."""
        return f"make {self.path}"

    def done(self) -> bool:
        """Return whether it is there."""
        return self.path.is_dir()

    def apply(self) -> None:
        """Make it. Raises HostFault."""
        try:
            self.path.mkdir(mode=0o755, exist_ok=True)
            self.path.chmod(0o755)
        except OSError as error:
            raise HostFault(f"{self.path}: {error.strerror}") from None

    def undo(self) -> None:
        """Remove it if nothing else is in it."""
        with contextlib.suppress(OSError):
            self.path.rmdir()


@dataclass(frozen=True)
class Link:
    """A setup step: a symbolic link of ours to the site's own hook."""

    path: Path
    target: Path

    @property
    def text(self) -> str:
        """Say what is linked."""
        return f"link {self.path} to the site's {self.target}"

    def done(self) -> bool:
        """Return whether it is there."""
        return self.path.is_symlink() and self.path.readlink() == self.target

    def apply(self) -> None:
        """Make it. Raises HostFault."""
        try:
            make_directories(self.path.parent)
            new = self.path.with_name(f".{self.path.name}.vtorque-new")
            new.unlink(missing_ok=True)
            new.symlink_to(self.target)
            new.replace(self.path)
        except OSError as error:
            raise HostFault(f"{self.path}: {error.strerror}") from None

    def undo(self) -> None:
        """Remove it."""
        if self.path.is_symlink():
            self.path.unlink()


@dataclass(frozen=True)
class Feature:
    """A setup step: this node has the site's feature.

    Slurm forgets it when slurm.conf is read again; the lasting place is ``Feature=`` of the node
    there.
    """

    name: str
    client: Client

    @property
    def text(self) -> str:
        """Say which feature."""
        return f"give this node the feature {self.name} (to last: NodeName=... Feature={self.name})"

    def done(self) -> bool:
        """Return whether the controller says so, or doctor has taken it away. Raises HostFault."""
        return outcome.is_marked(self.client, self.name)

    def apply(self) -> None:
        """Set it. Raises HostFault."""
        outcome.mark(self.client, self.name, healthy=True, reason="")

    def undo(self) -> None:
        """Take it away. Raises HostFault."""
        outcome.mark(self.client, self.name, healthy=False, reason="")


def _checks(settings: Settings, path: Path) -> Sequence[Check]:
    flags = {flag.strip().lower() for flag in conf.value(path, "PrologFlags").split(",")}
    least = round(settings.prolog_time)
    alloc = {"alloc", "contain", "x11"} & flags  # the others imply Alloc, slurm.conf(5)
    return (
        Check(
            "PrologFlags=Alloc",
            ""
            if alloc
            else f"{path}: without PrologFlags=Alloc guests would start only with the first step "
            "on a node, and not on all nodes: set it, then scontrol reconfigure",
        ),
        _least(path, "BatchStartTimeout", least, 10),
        _least(path, "PrologEpilogTimeout", least, _UNLIMITED),
    )


def _least(path: Path, key: str, least: int, default: int) -> Check:
    text = conf.value(path, key)
    now = int(text) if re.fullmatch(r"\d{1,6}", text, re.ASCII) else default
    problem = f"{path}: {key} is {now} s, guests may need {least} s: set {key}={least}"
    return Check(f"{key} of at least {least} s", "" if now >= least else problem)
