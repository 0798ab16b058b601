"""Read slurm.conf(5)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from vtorque_core.api import HostFault

_MAX_DEPTH = 8


def value(conf: Path, key: str) -> str:
    """Return the last value of a key, or an empty string."""
    found = ""
    for line in _lines(conf, _MAX_DEPTH):
        match = setting(line, key)
        found = match if match is not None else found
    return found


def setting(line: str, key: str) -> str | None:
    """Return the value if the line sets this key."""
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
        raise HostFault(f"{conf}: {error.strerror}: set [plugin.slurm] conf") from None
