"""Parse the TOML recipes of Linux images. doc/images.md describes the keys."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from vtorque_core.api import Refused, name_errors, size_mib

DEBIAN, REDHAT = "debian", "redhat"
SIZE_MIB = 8192
MIN_SIZE_MIB, MAX_SIZE_MIB = 1024, 1 << 20
MAX_RECIPE = 1 << 20  # bytes
MAX_COMMAND = 1 << 16  # characters
DISK = "disk"
KERNELS = ("cloud", "generic", "own", DISK)
_SUITE = re.compile(r"[a-z0-9][a-z0-9.-]{0,30}", re.ASCII)
_PACKAGES = {
    DEBIAN: re.compile(r"[a-z0-9][a-z0-9+.-]{1,127}", re.ASCII),  # Debian policy, 5.6.1
    REDHAT: re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,127}", re.ASCII),
}
_SOURCES = {
    DEBIAN: re.compile(
        r"deb (?:\[[a-z-]+=[A-Za-z0-9/._,-]+(?: [a-z-]+=[A-Za-z0-9/._,-]+)*\] )?"
        r"(?:https?|file)://[!-~]+(?: [A-Za-z0-9._/-]+)+",  # sources.list(5), one-line style
        re.ASCII,
    ),
    REDHAT: re.compile(r"(?:https?|file)://[!-~]+", re.ASCII),
}
_TOP = {
    **dict.fromkeys(("family", "suite", "kernel", "size"), str),
    **dict.fromkeys(("packages", "base_packages", "sources", "keys", "commands"), list),
    "unsigned": bool,
    "files": list,
    "application": dict,
}
_FILE = {"source": str, "content": str, "target": str, "mode": str}
_APPLICATION = {"source": str, "target": str}


@dataclass(frozen=True)
class AddedFile:
    """A file for the image: a text ``content``, or the path ``source`` in the recipe's directory.

    A directory is copied recursively. If ``mode`` is None, the source's mode is kept.
    """

    target: str
    source: str | None = None
    content: bytes = b""
    mode: int | None = None


@dataclass(frozen=True)
class LinuxRecipe:
    """A validated recipe. ``size`` is in MiB. If ``base_packages`` is None, defaults apply."""

    family: str
    suite: str
    packages: tuple[str, ...] = ()
    base_packages: tuple[str, ...] | None = None
    sources: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    unsigned: bool = False
    files: tuple[AddedFile, ...] = ()
    commands: tuple[str, ...] = ()
    size: int = SIZE_MIB
    kernel: str = "cloud"
    directory: Path = field(default=Path("/nonexistent"))


class _RecipeReader:
    """A checker of one recipe's tables. Every error names the file, the line and the key."""

    def __init__(self, path: Path, text: str) -> None:
        self.path = path
        self.lines = text.splitlines()

    def key_error(self, key: str, what: str, value: object = None, nth: int = 0) -> Refused:
        """Return the error for a key. ``nth`` selects one of several tables with the same name."""
        shown = "" if value is None else f" {str(value)[:200]!r}"
        return Refused(f"{self.path}, line {self._line(key, nth)}: {key}{shown}: {what}")

    def _line(self, key: str, nth: int) -> int:
        """Return the line number of a key, or of the key's table if the key is missing."""
        table, _, last = key.rpartition(".")
        start = 0
        if table:
            heads = [n for n, t in enumerate(self.lines) if re.match(rf"\s*\[+\s*{table}\b", t)]
            start = heads[min(nth, len(heads) - 1)] if heads else 0
        pattern = rf"\s*(?:\[+\s*)?[\"']?{re.escape(last)}[\"']?\s*[=.\]]"
        for number in range(start, len(self.lines)):
            if re.match(pattern, self.lines[number]):
                return number + 1
            if table and number > start and self.lines[number].lstrip().startswith("["):
                break  # the next table begins
        return start + 1

    def check_kinds(
        self, table: Mapping[str, Any], kinds: Mapping[str, type], prefix: str = "", nth: int = 0
    ) -> None:
        for key, value in table.items():
            if key not in kinds:
                raise self.key_error(
                    prefix + key, f"unknown key; known: {', '.join(kinds)}", nth=nth
                )
            if type(value) is not kinds[key]:
                raise self.key_error(prefix + key, f"must be a {_NAMES[kinds[key]]}", value, nth)

    def texts(self, table: Mapping[str, Any], key: str, most: int = 300) -> tuple[str, ...]:
        for text in table.get(key, ()):
            if type(text) is not str or not text or not text.isprintable() or len(text) > most:
                raise self.key_error(
                    key, f"must be printable strings of 1 to {most} characters", text
                )
        return tuple(table.get(key, ()))


_NAMES = {str: "text", list: "list", bool: "true or false", dict: "table"}


def read(path: Path) -> LinuxRecipe:
    """Parse a recipe file. Raises Refused naming the line and the key."""
    with name_errors(f"recipe {path}", fault=Refused):
        data = path.read_bytes()
    if len(data) > MAX_RECIPE:
        raise Refused(f"recipe {path}: is larger than {MAX_RECIPE} bytes")
    with name_errors(f"recipe {path}: is not TOML", ValueError, RecursionError, fault=Refused):
        text = data.decode()
        table = tomllib.loads(text)
    return parse(table, _RecipeReader(path, text), path.absolute().parent)


def parse(table: Mapping[str, Any], reader: _RecipeReader, directory: Path) -> LinuxRecipe:
    """Convert the table of a recipe file to a recipe. Raises Refused."""
    reader.check_kinds(table, _TOP)
    family = table.get("family")
    if family not in _PACKAGES:
        raise reader.key_error("family", "must be debian or redhat", family)
    suite = table.get("suite", "")
    if not _SUITE.fullmatch(suite):
        raise reader.key_error("suite", "must be the name or number of a release", suite)
    kernel = table.get("kernel", "own" if family == REDHAT else "cloud")
    if kernel not in KERNELS:
        raise reader.key_error("kernel", f"must be one of {', '.join(KERNELS)}", kernel)
    if kernel == DISK and family != DEBIAN:
        raise reader.key_error("kernel", f"{DISK} needs the debian family", kernel)
    sources = reader.texts(table, "sources")
    for source in sources:
        if not _SOURCES[family].fullmatch(source):
            form = "deb URL SUITE COMPONENT" if family == DEBIAN else "the URL of a repository"
            raise reader.key_error("sources", f"must be {form}", source)
    keys = reader.texts(table, "keys")
    for key in keys:
        _check_inside(reader, "keys", key)
    unsigned = table.get("unsigned", False)
    if family == REDHAT:
        if not sources:
            raise reader.key_error(
                "sources", "the redhat family needs the URLs of its repositories"
            )
        if not keys and not unsigned:
            fix = "name the files of the keys that sign the packages, or set unsigned = true"
            raise reader.key_error("keys", fix)
    base = table.get("base_packages")
    return LinuxRecipe(
        family=family,
        suite=suite,
        packages=_packages(reader, table, "packages", family),
        base_packages=None if base is None else _packages(reader, table, "base_packages", family),
        sources=sources,
        keys=keys,
        unsigned=unsigned,
        files=(*_files(reader, table), *_application(reader, table)),
        commands=_commands(reader, table),
        size=_size(reader, table),
        kernel=kernel,
        directory=directory,
    )


def check_packages(names: tuple[str, ...], family: str) -> str | None:
    """Return the first invalid package name, or None."""
    return next((name for name in names if not _PACKAGES[family].fullmatch(name)), None)


def check_suite(name: str) -> bool:
    """Return whether a release name is valid."""
    return _SUITE.fullmatch(name) is not None


def check_size(text: str) -> int:
    """Convert a size to MiB. Raises ValueError."""
    size = size_mib(text)
    if not MIN_SIZE_MIB <= size <= MAX_SIZE_MIB:
        raise ValueError("must be between 1G and 1T")
    return size


def _packages(
    reader: _RecipeReader, table: Mapping[str, Any], key: str, family: str
) -> tuple[str, ...]:
    names = reader.texts(table, key)
    bad = check_packages(names, family)
    if bad is not None:
        raise reader.key_error(key, f"is not a valid package name of the {family} family", bad)
    return names


def _size(reader: _RecipeReader, table: Mapping[str, Any]) -> int:
    if "size" not in table:
        return SIZE_MIB
    try:
        return check_size(table["size"])
    except ValueError as error:
        raise reader.key_error("size", str(error), table["size"]) from None


def _commands(reader: _RecipeReader, table: Mapping[str, Any]) -> tuple[str, ...]:
    for command in table.get("commands", ()):
        good = type(command) is str and command.strip() and len(command) <= MAX_COMMAND
        if not good or not command.replace("\n", " ").replace("\t", " ").isprintable():
            raise reader.key_error("commands", "must be strings with shell commands", command)
    return tuple(table.get("commands", ()))


def _files(reader: _RecipeReader, table: Mapping[str, Any]) -> list[AddedFile]:
    found = []
    for nth, each in enumerate(table.get("files", ())):
        if type(each) is not dict:
            raise reader.key_error("files", "must be tables: [[files]]", each)
        reader.check_kinds(each, _FILE, "files.", nth)
        target = _target(reader, "files.target", each.get("target", ""), nth)
        source, content = each.get("source"), each.get("content")
        if (source is None) == (content is None):
            raise reader.key_error("files.source", "set either source or content", target, nth)
        if source is not None:
            _check_inside(reader, "files.source", source, nth)
        mode = each.get("mode")
        if mode is not None and not re.fullmatch(r"0?[0-7]{3}", mode):
            raise reader.key_error(
                "files.mode", 'must be three octal digits, as in "755"', mode, nth
            )
        number = int(mode, 8) if mode is not None else None
        found.append(AddedFile(target, source, (content or "").encode(), number))
    return found


def _application(reader: _RecipeReader, table: Mapping[str, Any]) -> list[AddedFile]:
    each = table.get("application")
    if each is None:
        return []
    reader.check_kinds(each, _APPLICATION, "application.")
    source = each.get("source", "")
    _check_inside(reader, "application.source", source)
    name = PurePosixPath(source).name
    target = _target(reader, "application.target", each.get("target", f"/opt/{name}"))
    return [AddedFile(target, source)]


def _target(reader: _RecipeReader, key: str, path: str, nth: int = 0) -> str:
    parts = PurePosixPath(path).parts
    good = path.startswith("/") and len(parts) > 1 and path.isprintable() and len(path) < 1024
    if not good or ".." in parts or any(len(part.encode()) > 255 for part in parts):
        raise reader.key_error(
            key, "must be an absolute path in the image, without '..'", path, nth
        )
    if parts[1] in ("dev", "proc", "sys", "run", "boot"):
        raise reader.key_error(key, f"files below /{parts[1]} cannot be set by a recipe", path, nth)
    return path


def _check_inside(reader: _RecipeReader, key: str, path: str, nth: int = 0) -> None:
    parts = PurePosixPath(path).parts
    good = parts and not path.startswith("/") and path.isprintable() and len(path) < 1024
    if not good or ".." in parts:
        what = "must be a path below the recipe's directory, relative to it and without '..'"
        raise reader.key_error(key, what, path, nth)
