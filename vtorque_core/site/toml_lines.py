"""Find the line of a key in a TOML text, for messages; tomllib does not report lines."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

_ENDS = ("]", '"""', "'''")  # of values in several lines


def line_of(text: str, key: str) -> int | None:
    """Return the line (from 1) of a dotted key (``options.ram.max``) or its nearest table, or None.

    ``limits.1`` is the first of a list of tables.
    """
    lines = _lines(text)
    parts = key.split(".")
    above = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((lines[each] for each in above if each in lines), None)


def _lines(text: str) -> dict[str, int]:
    found: dict[str, int] = {}
    arrays: dict[str, int] = {}  # number of tables so far, by name
    table, statement, first = "", "", 1
    for number, line in enumerate(text.split("\n"), start=1):
        goes_on, statement = bool(statement), f"{statement}{line}\n"
        if goes_on and not any(end in line for end in _ENDS):
            continue
        try:
            keys = list(_keys(tomllib.loads(statement)))
        except tomllib.TOMLDecodeError:
            continue  # the statement continues in the next line
        if statement.lstrip().startswith("["):
            if statement.lstrip().startswith("[["):
                arrays[keys[-1]] = arrays.get(keys[-1], 0) + 1
            keys += [_array_key(key, arrays) for key in keys]
            table = f"{keys[-1]}."
        else:
            keys = [table + key for key in keys]
        for key in keys:
            found.setdefault(key, first)
        statement, first = "", number + 1
    return found


def _array_key(key: str, arrays: Mapping[str, int]) -> str:
    of = next((name for name in arrays if f"{key}.".startswith(f"{name}.")), None)
    return key if of is None else f"{of}.{arrays[of]}{key.removeprefix(of)}"


def _keys(data: Mapping[str, Any], above: str = "") -> Iterator[str]:
    for key, value in data.items():
        yield above + key
        if isinstance(value, Mapping):
            yield from _keys(value, f"{above}{key}.")
