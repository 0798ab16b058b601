"""Limits of a ``-vm`` key: ``[options.<key>]``, in the site config or a ``[[limits]]`` entry."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

from vtorque_core.api.values import Option
from vtorque_core.api.vm_options import JOB, RAM, UNLIMITED, VCPUS
from vtorque_core.base.errors import Refusal, printable
from vtorque_core.config.schema import LIMIT_KEYS
from vtorque_core.config.values import unknown


@dataclass(frozen=True)
class Rule:
    """An item of ``allow`` or ``deny``: a value, or a glob that a value's text must match."""

    text: str
    value: Any = None
    is_glob: bool = False

    def matches(self, value: Any, shown: str) -> bool:
        if self.is_glob:
            return fnmatchcase(shown, self.text)
        return bool(self.value == value)


@dataclass(frozen=True)
class Limits:
    """One ``[options.<key>]`` table.

    If ``allow`` is None, all values are allowed. If ``default`` is None, the option's own default
    applies. ``set_by`` has the dotted key of each value that is set: ``limits.1.options.ram.max``.
    """

    default: Any = None
    min: Any = None
    max: Any = None
    allow: tuple[Rule, ...] | None = None
    deny: tuple[Rule, ...] = ()
    set_by: Mapping[str, str] = field(default_factory=dict)

    def override(self, over: Limits, *, surely: bool = True) -> Limits:
        """Return these limits overridden by ``over``.

        ``surely`` is False if it is unknown whether ``over`` applies to the job. The result then
        lacks all limits that ``over`` sets, so that no job is refused by mistake.
        """
        found = over if surely else Limits(self.default)
        changed = {name: getattr(found, name) for name in over.set_by}
        return replace(self, **changed, set_by={**self.set_by, **found.set_by})


def is_job(option: Option[Any], value: Any) -> bool:
    """Return True for the value ``job``, which stands for the batch system's grant."""
    return option in (VCPUS, RAM) and value == JOB


def effective_default(option: Option[Any], limits: Limits) -> Any:
    return option.default if limits.default is None else limits.default


def show_limits(option: Option[Any], limits: Limits) -> dict[str, str | list[str]]:
    found: dict[str, str | list[str]] = {}
    for name in ("min", "max"):
        if (bound := getattr(limits, name)) is not None:
            found[name] = option.show(bound)
    if limits.allow is not None:
        found["allow"] = [rule.text for rule in limits.allow]
    if limits.deny:
        found["deny"] = [rule.text for rule in limits.deny]
    return found


def refusal(
    option: Option[Any], limits: Limits, value: Any, text: str, place: Callable[[str], str]
) -> Refusal | None:
    """Return the refusal of a typed ``value``, or None if it is allowed.

    ``text`` is the value as the user wrote it. ``place`` returns table and file of a dotted key.
    """

    def refuse(message: str, name: str, limit: str) -> Refusal:
        where = place(limits.set_by[name])
        return Refusal(message, option.key, text, printable(limit), where)

    if is_job(option, value):  # the resulting number is checked later
        limits = Limits(deny=limits.deny, set_by=limits.set_by)
    if limits.min is not None and value < limits.min:
        return refuse("is less than allowed", "min", option.show(limits.min))
    if limits.max is not None and value > limits.max:
        return refuse("is more than allowed", "max", option.show(limits.max))
    if limits.allow is None and not limits.deny:
        return None
    shown = option.show(value)
    # Check each item: a glob for one item would match a whole list that begins with it.
    items = shown.split(option.separator) if option.separator else []
    each = [(item, item) for item in items] if len(items) > 1 else [(value, shown)]
    if limits.allow is not None:
        whole = any(r.matches(value, shown) for r in limits.allow if not r.is_glob)
        if not whole and not all(any(r.matches(*one) for r in limits.allow) for one in each):
            return refuse("is not allowed", "allow", _show_rules(limits.allow))
    if any(rule.matches(*one) for rule in limits.deny for one in (*each, (value, shown))):
        return refuse("is not allowed", "deny", "not " + _show_rules(limits.deny))
    return None


def nearest(option: Option[Any], limits: Limits, number: int) -> int:
    """Return the largest allowed value up to ``number``, otherwise the smallest allowed value."""
    rules = (rule.value for rule in limits.allow or () if not rule.is_glob)
    named = [*rules, *(each for each in (limits.min, limits.max) if each is not None)]
    granted = [
        each
        for each in (number, *named)
        if not is_job(option, each) and refusal(option, limits, each, "", str) is None
    ]
    fitting = [each for each in granted if each <= number]
    return max(fitting) if fitting else min(granted, default=number)


def read_limits(
    option: Option[Any], table: Mapping[str, Any], name: str, below: Limits
) -> tuple[Limits, dict[str, str]]:
    """Parse the ``table`` of an option; return its limits, and problems by key.

    ``name`` is the table's dotted name. ``below`` are the limits that the table overrides.
    """
    found: dict[str, Any] = {}
    problems: dict[str, str] = {}
    for key, value in table.items():
        try:
            if key not in LIMIT_KEYS:
                problems[key] = unknown(key, LIMIT_KEYS)
            elif key in ("allow", "deny"):
                found[key] = _rules(option, value)
            else:
                found[key] = _bound(option, key, value)
        except ValueError as error:
            problems[key] = str(error)
    limits = Limits(**found, set_by={key: f"{name}.{key}" for key in found})
    if not problems:
        problems = _contradictions(option, below.override(limits), table)
    return limits, problems


def _bound(option: Option[Any], key: str, value: Any) -> Any:
    if option.is_file and not option.words:
        raise ValueError("cannot be set for a key that names a file: use deny = ['*'] instead")
    typed = _parse(option, value)
    if key != "default" and (isinstance(typed, bool) or not isinstance(typed, int | float)):
        raise ValueError("makes no sense for a key that is not a number: use allow or deny")
    if key != "default" and is_job(option, typed):
        raise ValueError("must be a number: only default can be 'job' (the job's allocation)")
    return typed


def _rules(option: Option[Any], value: Any) -> tuple[Rule, ...]:
    if not isinstance(value, list):
        raise ValueError(f"is {printable(repr(value), 80)}, but must be a list in brackets")
    if option.is_file and not option.words and value not in ([], ["*"]):
        raise ValueError("must be [] or ['*'], because users choose the names of their files")
    return tuple(_rule(option, item) for item in value)


def _rule(option: Option[Any], item: Any) -> Rule:
    may_be_glob = not option.is_file or item == "*"  # users choose the names of their files
    if isinstance(item, str) and any(c in item for c in "*?[") and may_be_glob:
        return Rule(item, is_glob=True)
    return Rule(_text(item), _parse(option, item))


def _parse(option: Option[Any], value: Any) -> Any:
    text = _text(value)
    try:
        return option.parse(text)
    except ValueError as error:
        raise ValueError(f"{printable(text, 80)!r} {error}") from None


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str | int):
        return str(value)
    raise ValueError(f"is {printable(repr(value), 80)}, but must be text, a number or true/false")


def _contradictions(
    option: Option[Any], limits: Limits, table: Mapping[str, Any]
) -> dict[str, str]:
    if limits.min is not None and limits.max is not None and limits.min > limits.max:
        least, most = option.show(limits.min), option.show(limits.max)
        if "min" in table:
            return {"min": f"is {least}, more than max = {most}"}
        return {"max": f"is {most}, less than min = {least}"}
    value = effective_default(option, limits)
    if value is None or value == "":
        return {}
    against = refusal(option, limits, value, option.show(value), str)
    if against is None and is_job(option, value):  # its value without any grant
        value = nearest(option, limits, UNLIMITED[option.key])
        against = refusal(option, limits, value, option.show(value), str)
    if against is None:
        return {}
    if "default" in table:
        return {"default": f"is {option.show(value)}, which {against.message}: {against.limit}"}
    name = str(against.where).rpartition(".")[2]
    return {
        name: f"excludes {option.show(value)}, the default of {option.key}: set default here too"
    }


def _show_rules(rules: tuple[Rule, ...]) -> str:
    return ", ".join(rule.text for rule in rules) or "nothing"
