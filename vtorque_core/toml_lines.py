"""Find the line of a key in a TOML text, which tomllib does not tell. For messages only."""

from __future__ import annotations

import re

_PART = r"""(?:[A-Za-z0-9_-]+|"(?:[^"\\\n]|\\.)*"|'[^'\n]*')"""
_DOTTED = rf"{_PART}(?:[ \t]*\.[ \t]*{_PART})*"
_BLANK = re.compile(r"(?:\s|#[^\n]*)+")
_HEADER = re.compile(rf"\[\[?[ \t]*({_DOTTED})[ \t]*\]\]?")
_ASSIGN = re.compile(rf"({_DOTTED})[ \t]*=")
_ONE_PART = re.compile(_PART)
_VALUE = re.compile(
    r'"""(?:\\.|[^\\])*?""""{0,2}'
    r"|'''.*?''''{0,2}"
    r"""|"(?:[^"\\\n]|\\.)*"|'[^'\n]*'|#[^\n]*|[\[\]{}\n]|[^"'#\[\]{}\n]+""",
    re.DOTALL,
)


def line_of(text: str, key: str) -> int | None:
    """Return the line, from 1, of a dotted key (``options.ram.max``) in a valid TOML text.

    Within an inline table it is the table's line; otherwise the nearest table header above the
    key. None if there is nothing of it.
    """
    lines = _lines(text)
    parts = key.split(".")
    for length in range(len(parts), 0, -1):
        line = lines.get(".".join(parts[:length]))
        if line is not None:
            return line
    return None


def _lines(text: str) -> dict[str, int]:
    found: dict[str, int] = {}
    table = ""
    position = 0
    while position < len(text):
        if blank := _BLANK.match(text, position):
            position = blank.end()
        elif header := _HEADER.match(text, position):
            table = _plain(header[1])
            _note(found, table, text, position)
            position = header.end()
        elif assign := _ASSIGN.match(text, position):
            name = _plain(assign[1])
            _note(found, f"{table}.{name}" if table else name, text, position)
            position = _after_value(text, assign.end())
        else:
            position = text.find("\n", position) + 1 or len(text)
    return found


def _note(found: dict[str, int], key: str, text: str, position: int) -> None:
    line = text.count("\n", 0, position) + 1
    parts = key.split(".")
    for length in range(1, len(parts) + 1):
        found.setdefault(".".join(parts[:length]), line)


def _plain(dotted: str) -> str:
    return ".".join(part.strip("\"'") for part in _ONE_PART.findall(dotted))


def _after_value(text: str, position: int) -> int:
    depth = 0
    while token := _VALUE.match(text, position):
        position = token.end()
        if token[0] in ("[", "{"):
            depth += 1
        elif token[0] in ("]", "}"):
            depth -= 1
        elif token[0] == "\n" and depth <= 0:
            return position
    return len(text)
