"""Convert TOML or JSON values to typed dataclasses, by annotations and ``setting()``."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from vtorque_core.base.errors import printable
from vtorque_core.base.sizes import duration, size_mib
from vtorque_core.base.suggest import hint

_MOST = 1e300  # an int can exceed the range of float
_hints = functools.cache(typing.get_type_hints)  # a list of images needs them for each image
_WORDS = {bool: "true or false", int: "a whole number", str: "text in quotes", Path: "a path"}


def convert(kind: Any, value: Any, unit: str | None = None) -> Any:  # noqa: PLR0911 (one per kind)
    """Return a TOML value as the type ``kind``. Raises ValueError.

    ``kind`` is bool, int, float, str, Path, Literal, X | None, tuple[X, ...], Mapping[str, X], or a
    dataclass of such fields. With a ``unit``, text is a size or duration.
    """
    if unit is None and kind in _WORDS:  # first, because a list of images converts many values
        return _plain(kind, value)
    origin = get_origin(kind)
    if unit is not None and origin is None:
        return _with_unit(kind, value, unit)
    if origin is Literal:
        if value not in get_args(kind) or isinstance(value, bool):
            raise _type_error(value, f"one of {', '.join(str(a) for a in get_args(kind))}")
        return value
    if origin in (Union, types.UnionType):
        inner = [arg for arg in get_args(kind) if arg is not type(None)]
        one = len(inner) == 1 and value is not None
        return convert(inner[0], value, unit) if one else value
    if origin is tuple:
        if not isinstance(value, list):
            raise _type_error(value, "a list in brackets")
        return tuple(convert(get_args(kind)[0], item, unit) for item in value)
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, dict):
            raise _type_error(value, "a table")
        of_key, of_item = get_args(kind)
        return {convert(of_key, k): convert(of_item, item, unit) for k, item in value.items()}
    if dataclasses.is_dataclass(kind):
        return _check_depth(typing.cast("type[Any]", kind), value)
    return _plain(kind, value)


def read_fields(cls: Any, table: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return (valid values by key, problems by key) of a table. Missing keys are problems too."""
    hints = _hints(cls)
    known = {f.name: f for f in dataclasses.fields(cls) if f.init}
    values: dict[str, Any] = {}
    problems: dict[str, str] = {}
    for key, value in table.items():
        if key not in known:
            problems[key] = unknown(key, known)
            continue
        metadata = known[key].metadata
        try:
            values[key] = convert(hints[key], value, metadata.get("unit"))
            if metadata.get("check") and values[key] != known[key].default:
                metadata["check"](values[key])
        except ValueError as error:
            problems[key] = str(error)
    for key, f in known.items():
        if key not in table and is_required(f):
            problems[key] = f"must be set: {f.metadata.get('doc', 'it has no default')}"
    return values, problems


def is_required(field: dataclasses.Field[Any]) -> bool:
    missing = dataclasses.MISSING
    return field.default is missing and field.default_factory is missing


def unknown(name: str, known: Iterable[str], what: str = "key") -> str:
    names = sorted(known)
    return f"there is no such {what}; " + hint(name, names, f"there are: {', '.join(names)}")


def _plain(kind: Any, value: Any) -> Any:
    if kind is Any:
        return value
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        if not abs(value) <= _MOST:
            raise _type_error(value, "a finite number")
        return float(value)
    if kind is Path and isinstance(value, str):
        if not value or "\0" in value:
            raise _type_error(value, "a path")
        return Path(value)
    if type(value) is not kind or (kind is str and "\0" in value):
        raise _type_error(value, _WORDS.get(kind, getattr(kind, "__name__", str(kind))))
    return value


def _with_unit(kind: Any, value: Any, unit: str) -> Any:
    number = value
    if isinstance(value, str):
        try:
            number = duration(value) if unit == "s" else _mib(value)
        except ValueError as error:
            raise ValueError(f"is {value!r}: {error}") from None
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise _type_error(value, "a duration like 90s" if unit == "s" else "a size like 512M")
    if not math.isfinite(number) or number < 0:
        raise _type_error(value, "zero or more")
    if kind is int:
        if number != int(number):
            raise _type_error(value, f"a whole number of {unit}")
        return int(number)
    return float(number)


def _mib(text: str) -> int:
    # A reserve may be "0". size_mib refuses that, because a guest needs memory.
    return 0 if text.strip() == "0" else size_mib(text)


def _check_depth(cls: type[Any], value: Any) -> Any:
    if not isinstance(value, dict):
        raise _type_error(value, "a table")
    values, problems = read_fields(cls, value)
    for key, problem in problems.items():
        raise ValueError(f"{key}: {problem}")
    return cls(**values)


def _type_error(value: Any, wanted: str) -> ValueError:
    return ValueError(f"is {printable(repr(value), 80)}, but must be {wanted}")
