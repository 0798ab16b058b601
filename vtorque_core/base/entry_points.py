"""Entry points of the installed distributions, of the groups one asks for.

Every ``vsub`` looks for plugins. :mod:`importlib.metadata` imports parsers of mail, of ZIP and of
tables for it, 20 ms; here is what its format needs (PyPA's entry points specification): directories
``NAME-VERSION.dist-info`` on ``sys.path``, of one name the first, each with an
``entry_points.txt`` or none.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator
from functools import cache, cached_property, reduce
from pathlib import Path
from typing import Any

from vtorque_core.base.record import dataclass

_ENDS = (".dist-info", ".egg-info")  # the second: what setuptools' own "develop" leaves


@dataclass(frozen=True)
class EntryPoint:
    """One line of a distribution's ``entry_points.txt``: ``name = module:attribute``.

    ``about`` is the distribution's directory of metadata.
    """

    name: str
    value: str
    group: str
    about: str

    @property
    def module(self) -> str:
        """The module's dotted name."""
        return self.value.partition(":")[0].strip()

    def load(self) -> Any:
        """Import the module; return it, or what the value names in it. Raises as the import."""
        attribute = self.value.partition(":")[2].partition("[")[0].strip()
        words = filter(None, attribute.split("."))
        return reduce(getattr, words, importlib.import_module(self.module))

    @cached_property
    def distribution(self) -> str:
        """``name version`` of the distribution: lines in its metadata's head."""
        return _name_version(self.about)


def entry_points(groups: Collection[str]) -> list[EntryPoint]:
    """Return the entry points of these groups, in the order of ``sys.path``."""
    found = (point for about in _abouts(sys.path) for point in _read(about))
    return [point for point in found if point.group in groups]


def _abouts(path: Iterable[str]) -> Iterator[str]:
    """Yield the directory of metadata of each distribution."""
    seen = set()
    for directory in dict.fromkeys(path):
        try:
            names = sorted(os.listdir(directory or "."))  # noqa: PTH208 - of every vsub
        except OSError:
            continue  # a ZIP file, or not there
        for name in names:
            if name.endswith(_ENDS) and (whose := _name_of(name)) not in seen:
                seen.add(whose)
                yield f"{directory or '.'}/{name}"


def _name_of(about: str) -> str:
    return re.sub(r"[-_.]+", "-", about.rpartition(".")[0].partition("-")[0]).lower()


def _read(about: str) -> tuple[EntryPoint, ...]:
    """Return the entry points, those that were read before if the file is the same."""
    try:
        file = os.stat(f"{about}/entry_points.txt")  # noqa: PTH116 - of every vsub
        return _parsed(about, file.st_ino, file.st_mtime_ns, file.st_size)
    except (OSError, UnicodeDecodeError):
        return ()  # it has none (or is broken, as pip would not have installed it)


@cache
def _parsed(about: str, *_file: int) -> tuple[EntryPoint, ...]:
    """Return the entry points: an INI file without interpolation, names case sensitive."""
    text = Path(f"{about}/entry_points.txt").read_text(encoding="utf-8")
    group, found = "", []
    for line in (line.strip() for line in text.splitlines()):
        if line.startswith("[") and line.endswith("]"):
            group = line[1:-1].strip()
        elif "=" in line and not line.startswith(("#", ";")):
            name, _, value = line.partition("=")
            found.append(EntryPoint(name.strip(), value.strip(), group, about))
    return tuple(found)


def _name_version(about: str) -> str:
    """Return ``name version`` from METADATA, or PKG-INFO; of a broken one from its own name."""
    named, _, version = Path(about).name.rpartition(".")[0].partition("-")
    found = {"Name": named, "Version": version}
    for file in ("METADATA", "PKG-INFO"):
        try:
            head = Path(f"{about}/{file}").read_text(encoding="utf-8").partition("\n\n")[0]
        except (OSError, UnicodeDecodeError):
            continue
        found |= dict(line.split(": ", 1) for line in head.splitlines() if ": " in line)
    return f"{found['Name']} {found['Version']}"
