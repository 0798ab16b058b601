"""slurm.conf: read a value, and set one so that it can be taken back byte for byte. slurm.conf(5).

A line of the site's that gives way is kept as a comment right below ours, so that other edits made
meanwhile survive.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vtorque_core.api import HostFault
from vtorque_core.api_setup import MARK

_KEPT = f"#kept by {MARK.decode()}#"
_OURS = f"  # {MARK.decode()}"
_MAX_DEPTH = 8


def value(conf: Path, key: str) -> str:
    """Return what the file says of a key, the last time; empty: nothing. Raises HostFault."""
    found = ""
    for line in _lines(conf, _MAX_DEPTH):
        match = _setting(line, key)
        found = match if match is not None else found
    return found


def with_line(text: str, key: str, value_: str) -> str:
    """Return the text with ``key=value`` as its one line of that key."""
    ours = f"{key}={value_}{_OURS}\n"
    lines = text.splitlines(keepends=True)
    places = [i for i, line in enumerate(lines) if _setting(line, key) is not None]
    if not places:  # not at the end, where a line may go on (a backslash) or have no newline
        return ours + text
    for i in places:
        lines[i] = _KEPT + lines[i]
    lines.insert(places[0], ours)
    return "".join(lines)


def without_line(text: str, key: str) -> str:
    """Return the text as it was before :func:`with_line`."""
    mark = re.escape(MARK.decode())
    text = re.sub(rf"^{key}=[^\n]*  # {mark}\n", "", text, flags=re.MULTILINE)
    kept = rf"^{re.escape(_KEPT)}(?=\s*{key}\s*=)"
    return re.sub(kept, "", text, flags=re.MULTILINE | re.IGNORECASE)


@dataclass(frozen=True)
class ConfLine:
    """A setup step: one line of slurm.conf. ``value``: what ours is."""

    conf: Path
    key: str
    value: str

    @property
    def text(self) -> str:
        """Say what is set, and what has to follow."""
        return (
            f"set {self.key}={self.value} in {self.conf}, keeping the site's line as a comment "
            "(when all nodes have it: scontrol reconfigure)"
        )

    def done(self) -> bool:
        """Return whether Slurm reads our value. Raises HostFault."""
        return value(self.conf, self.key) == self.value

    def apply(self) -> None:
        """Write it. Raises HostFault."""
        text = without_line(_read(self.conf), self.key)
        _write(self.conf, with_line(text, self.key, self.value))

    def undo(self) -> None:
        """Take it back. Raises HostFault."""
        text = _read(self.conf)
        before = without_line(text, self.key)
        if before != text:
            _write(self.conf, before)


def _setting(line: str, key: str) -> str | None:
    """Return the value of a line ``key=value``; None: it is another line."""
    match = re.match(rf"\s*{key}\s*=\s*([^#\n]*)", line, re.IGNORECASE)
    return None if match is None else match[1].strip().strip('"')


def _lines(conf: Path, depth: int) -> Iterator[str]:
    for line in _read(conf).splitlines():
        yield line
        match = re.match(r"\s*include\s+(\S+)", line, re.IGNORECASE)
        if match and depth:
            yield from _lines(conf.parent / match[1], depth - 1)


def _read(conf: Path) -> str:
    try:
        return conf.read_text("utf-8", "surrogateescape")
    except OSError as error:
        raise HostFault(f"{conf}: {error.strerror}: see [plugin.slurm] conf") from None


def _write(conf: Path, text: str) -> None:
    """Replace the file in one step; owner and mode stay. Raises HostFault."""
    try:
        target = conf.resolve(strict=True)
        status = target.stat()
        new = target.with_name(f".{target.name}.vtorque-new")
        new.unlink(missing_ok=True)
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(text.encode("utf-8", "surrogateescape"))
            file.flush()
            os.fchown(descriptor, status.st_uid, status.st_gid)
            os.fchmod(descriptor, status.st_mode & 0o7777)
            os.fsync(descriptor)
        new.replace(target)
    except OSError as error:
        raise HostFault(f"{conf}: {error.strerror}") from None
