"""The directory of an experiment's results, and the paths of its files."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from vtorque_core.api import Refused, printable
from vtorque_experiment import files

_PLAIN = re.compile(r"[A-Za-z0-9._/+@=-]+", re.ASCII)


@dataclass(frozen=True)
class ResultsDirectory:
    """A results directory. ``top`` is an absolute path without characters special to shells."""

    top: Path

    @property
    def database(self) -> Path:
        """The path of the book, a database of all points and their states."""
        return self.top / "results.sqlite"

    @property
    def definition(self) -> Path:
        """The copy of the experiment's file."""
        return self.top / "experiment.toml"

    @property
    def versions(self) -> Path:
        """The file with the versions of software and hardware."""
        return self.top / "versions.json"

    @property
    def scripts(self) -> Path:
        """The directory of the numbered copies of the job scripts."""
        return self.top / "scripts"

    def point(self, number: int) -> Path:
        """Return a point's directory. Its parent directory contains at most 1,000 points."""
        return self.top / "points" / f"{number // 1000:03}" / f"{number:06}"

    def write(self, path: Path, content: bytes, mode: int = 0o644) -> None:
        """Write a file below ``top`` without following symbolic links. Raises OSError."""
        files.write(self.top, *path.relative_to(self.top).parts, content=content, mode=mode)


def read_tail(point: Path, name: str, most: int) -> str:
    """Return the end, at most ``most`` bytes, of a file that a job wrote in a point's directory.

    Raises OSError for a missing file, a file that is not regular, or a symbolic link.
    """
    names = (*point.parts[-3:], *Path(name).parts)  # see ResultsDirectory.point
    return files.read(point.parents[2], *names, most=most, end=True).decode("utf-8", "replace")


def validate_place(path: Path) -> ResultsDirectory:
    """Return the results directory at a path, which need not exist.

    Raises Refused for characters that batch systems interpret.
    """
    whole = Path(os.path.abspath(path))  # noqa: PTH100 - links are kept: they may differ on other hosts
    if not _PLAIN.fullmatch(str(whole)):
        raise Refused(
            "contains characters that are special in batch systems",
            key="directory",
            value=printable(str(whole)),
            limit="letters, digits and . _ / + @ = -",
            fix="use another directory: --dir DIR",
        )
    return ResultsDirectory(whole)


def find_existing(path: Path) -> ResultsDirectory:
    """Return the results directory of an existing experiment. Raises Refused if there is none."""
    place = validate_place(path)
    if place.top.is_symlink() or place.database.is_symlink() or not place.database.is_file():
        raise Refused(
            f"{printable(str(path))}: is not a results directory of an experiment; vmgr "
            "experiment run FILE creates one"
        )
    return place
