"""Set one key of the site config without changing the rest, including comments. As root."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

from vtorque_core.api import HostFault
from vtorque_core.api.setup_steps import make_directories, rewrite_file
from vtorque_core.live.site_config import MAX_BYTES, line_of

_HEADER = re.compile(r"[ \t]*\[[^\[\]]+\][ \t\r]*(?:#.*)?")
_NEW = "# vTorque site config. All keys with their defaults: vtorque config example\n"


def set_value(text: str, table: str, key: str, value: str) -> str:
    """Return the config ``text`` with ``key`` of ``table`` (``options.img``) set to ``value``.

    Raises HostFault if ``text`` writes the table in a form that this function cannot edit.
    """
    line = re.compile(
        rf"""((?:^|[\s{{,.])["']?{re.escape(key)}["']?[ \t]*=[ \t]*)"""
        r"""(?:"(?:[^"\\\n]|\\.)*"|'[^'\n]*')"""
    )
    lines = text.split("\n")
    shown = json.dumps(value)
    try:
        wanted = tomllib.loads(text)
        inner = wanted
        for part in table.split("."):
            inner = inner.setdefault(part, {})
        at = line_of(text, f"{table}.{key}")
        if key in inner and at is not None:
            lines[at - 1] = line.sub(lambda m: m[1] + shown, lines[at - 1], count=1)
        elif at is not None and _HEADER.fullmatch(lines[at - 1]):
            lines.insert(at, f"{key} = {shown}")
        else:
            lines += [f"[{table}]", f"{key} = {shown}", ""]
        inner[key] = value
        new = "\n".join(lines)
        if tomllib.loads(new) == wanted:
            return new
    except (ValueError, AttributeError, TypeError):
        pass
    raise HostFault(f"[{table}] is too complex to edit: write {key} = {shown} yourself")


def read(config: Path) -> str:
    """Return the text of the config; if it is missing, the comment that begins a new config.

    Raises HostFault if the config is unreadable.
    """
    try:
        with config.open("rb") as file:
            return file.read(MAX_BYTES).decode()
    except FileNotFoundError:
        return _NEW
    except (OSError, ValueError) as error:
        raise HostFault(f"{config}: {error}") from None


def write(config: Path, text: str) -> None:
    """Replace the config, and keep its owner and mode. Raises HostFault if writing fails."""
    if not config.exists():
        make_directories(config.resolve().parent)
    rewrite_file(config, text.encode())
