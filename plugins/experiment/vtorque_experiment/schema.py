"""Check a file's values against the JSON schema that is shipped, and say what is wrong in our way.

Only the words of JSON Schema that our schema has; a test holds it against the library jsonschema,
which takes seconds to import where its optional checkers of formats are installed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from importlib import resources
from typing import Any

from vtorque_core.api import Refusal, printable

_TYPES: Mapping[str, Callable[[Any], bool]] = {
    "object": lambda v: isinstance(v, dict),
    "array": lambda v: isinstance(v, list),
    "string": lambda v: isinstance(v, str),
    "boolean": lambda v: isinstance(v, bool),
    "integer": lambda v: isinstance(v, int) and not isinstance(v, bool),
    "number": lambda v: isinstance(v, int | float) and not isinstance(v, bool),
}
_LIMITS: Mapping[str, tuple[Callable[[Any, Any], bool], str]] = {
    "minimum": (lambda v, limit: v >= limit, "is too small"),
    "exclusiveMinimum": (lambda v, limit: v > limit, "is too small"),
    "maximum": (lambda v, limit: v <= limit, "is too large"),
    "minLength": (lambda v, limit: len(v) >= limit, "is empty"),
    "maxLength": (lambda v, limit: len(v) <= limit, "is too long"),
    "minItems": (lambda v, limit: len(v) >= limit, "is empty"),
    "maxItems": (lambda v, limit: len(v) <= limit, "has too many values"),
    "minProperties": (lambda v, limit: len(v) >= limit, "is empty"),
    "enum": (lambda v, limit: v in limit, "is not one of these"),
}
Schema = Mapping[str, Any]


def shipped() -> dict[str, Any]:
    """Return the JSON schema of an experiment's file."""
    text = resources.files("vtorque_experiment").joinpath("experiment.schema.json").read_text()
    found: dict[str, Any] = json.loads(text)
    return found


def wrong(value: Any, schema: Schema, where: str) -> Iterator[Refusal]:
    """Yield all that is wrong with what was read from the file ``where``."""
    yield from _wrong(value, schema, schema["$defs"], "", where)


def meant(name: str, known: Mapping[str, Any]) -> str:
    """Return a hint for a name that is not known."""
    close = get_close_matches(name, known, 1)
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(sorted(known))}"


def _wrong(value: Any, schema: Schema, defs: Schema, at: str, where: str) -> Iterator[Refusal]:
    if "$ref" in schema:
        schema = {**schema, **defs[schema["$ref"].rpartition("/")[2]]}
    said = {"key": at or "the file", "value": _shown(value), "where": where}
    types = schema.get("type", [])
    types = [types] if isinstance(types, str) else types
    if types and not any(_TYPES[name](value) for name in types):
        fix = schema.get("description", "see doc/experiment.md")
        yield Refusal(f"is not of type {' or '.join(types)}", **said, fix=fix)
        return
    for word, (holds, text) in _LIMITS.items():
        if word in schema and not holds(value, schema[word]):
            yield Refusal(text, **said, limit=_shown(schema[word]), fix=schema.get("description"))
    if "pattern" in schema and not re.search(schema["pattern"], value):
        yield Refusal("has characters that cannot be here", **said, limit=schema["pattern"])
    if isinstance(value, list):
        yield from _items(value, schema, defs, at, where)
    if isinstance(value, dict):
        yield from _members(value, schema, defs, at, where)


def _items(value: Any, schema: Schema, defs: Schema, at: str, where: str) -> Iterator[Refusal]:
    texts = [json.dumps(each, default=str) for each in value]
    twice = next((text for text in texts if texts.count(text) > 1), None)
    if schema.get("uniqueItems") and twice is not None:
        yield Refusal("has a value twice", key=at, value=printable(twice, 80), where=where)
    for number, each in enumerate(value):
        yield from _wrong(each, schema.get("items", {}), defs, f"{at}[{number}]", where)


def _members(value: Any, schema: Schema, defs: Schema, at: str, where: str) -> Iterator[Refusal]:
    known = schema.get("properties", {})
    more = schema.get("additionalProperties", {})
    for name, each in value.items():
        inside = f"{at}.{name}" if at else name
        if name in known:
            yield from _wrong(each, known[name], defs, inside, where)
        elif more is False:
            yield Refusal(
                f"there is no such key{f' in [{at}]' if at else ''}", key=printable(name, 60),
                value=_shown(each), where=where, fix=meant(name, known),
            )  # fmt: skip
        else:
            names = schema.get("propertyNames", {})
            yield from _wrong(name, names, defs, f"a name in [{at}]", where)
            yield from _wrong(each, more, defs, inside, where)
    if "oneOf" in schema:
        words = [choice["required"][0] for choice in schema["oneOf"]]
        if sum(word in value for word in words) != 1:
            yield Refusal(
                f"has not exactly one of {', '.join(words)}", key=f"[{at}]",
                value=_shown(value), where=where, fix="keep one, and what belongs to it",
            )  # fmt: skip


def _shown(value: Any) -> str:
    return printable(json.dumps(value, default=str), 80)
