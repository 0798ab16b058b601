"""Validate an experiment's file by its JSON schema, with readable errors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from importlib import resources
from typing import Any

import jsonschema_rs

from vtorque_core.api import Refusal, printable

Schema = dict[str, Any]


def load_schema() -> Schema:
    """Return the JSON schema of an experiment's file."""
    text = resources.files("vtorque_experiment").joinpath("experiment.schema.json").read_text()
    found: Schema = json.loads(text)
    return found


def find_errors(values: Mapping[str, Any], where: str) -> Iterator[Refusal]:
    """Yield all errors in the values of the file ``where``."""
    schema = load_schema()
    try:
        errors = [*jsonschema_rs.validator_for(schema, mask="it").iter_errors(values)]
    except ValueError as error:  # TOML allows dates, JSON does not
        yield Refusal(printable(str(error), 80), where=where, fix="write it as a string, in quotes")
        return
    for each in errors:
        rule: Any = schema
        for step in each.schema_path[:-1]:
            rule = rule[step]
        yield from _refusals(each, schema, rule, where)


def _refusals(
    error: jsonschema_rs.ValidationError, schema: Schema, rule: Schema, where: str
) -> Iterator[Refusal]:
    at, kind = _key(error.instance_path), error.kind.name
    value: Any = error.instance
    more: dict[str, Any] = error.kind.as_dict()
    if kind == "additionalProperties":
        for name in more["unexpected"]:
            hint = _suggest_table(schema, at, name) or suggest_name(name, rule["properties"])
            yield Refusal("there is no such key", key=_key([*error.instance_path, name]),
                          value=_show_value(value[name]), where=where, fix=hint)  # fmt: skip
    elif kind == "propertyNames":
        yield Refusal(more["error"].message, key=f"a name in [{at}]",
                      value=_show_value(more["error"].instance), where=where)  # fmt: skip
    elif kind == "oneOf":
        words = ", ".join(choice["required"][0] for choice in rule["oneOf"])
        yield Refusal(f"needs exactly one of {words}", key=f"[{at}]", value=_show_value(value),
                      where=where, fix="keep one, and the keys that belong to it")  # fmt: skip
    else:
        listed = rule.get("type") == "array" and not isinstance(value, list | dict)
        fix = f"write [{_show_value(value)}]" if listed else rule.get("description")
        yield Refusal(error.message, key=at, value=_show_value(value), where=where, fix=fix)


def suggest_name(name: str, known: Mapping[str, Any]) -> str:
    """Return a hint for an unknown name: the most similar known name, or all known names."""
    close = get_close_matches(name, known, 1)
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(sorted(known))}"


def _suggest_table(schema: Schema, at: str, name: str) -> str:
    known = schema["properties"]
    for table in ("matrix", "limits"):
        if not at and name in known[table]["properties"]:
            return f"did you mean {table}.{name}?"
    if at == "matrix" and "." not in name and not get_close_matches(name, known[at]["properties"]):
        return f"did you mean {'env' if name.isupper() else 'vm'}.{printable(name, 60)}?"
    return ""


def _key(path: Sequence[str | int]) -> str:
    return ".".join(printable(str(step), 60) for step in path)


def _show_value(value: Any) -> str:
    return printable(json.dumps(value, default=str), 80)
