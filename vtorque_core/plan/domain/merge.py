"""Merge the domain elements of all plugins for one guest, or report conflicts."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from vtorque_core.api.libvirt_domain import Element, Filesystem, ListElement, MemoryBacking, Single
from vtorque_core.base.errors import Conflict, Refused

E = TypeVar("E", bound=Element)

CORE = "core"
_NAME = re.compile(r"[A-Za-z0-9_-]{1,80}")  # characters of an alias: formatdomain.html, "alias"


@dataclass(frozen=True)
class Contributed:
    plugin: str
    distribution: str
    element: Element

    def __str__(self) -> str:
        return f"plugin {self.plugin} ({self.distribution})"


@dataclass(frozen=True)
class Merged:
    """One element of a merged domain, and the plugins that returned it.

    Only a :class:`ListElement` has a libvirt ``alias``, and a ``number``: its index among the
    elements of its class.
    """

    element: Element
    alias: str
    number: int
    plugins: tuple[str, ...]


@dataclass(frozen=True)
class MergedDomain:
    items: tuple[Merged, ...]

    def lists(self, kind: type[E]) -> tuple[E, ...]:
        return tuple(i.element for i in self.items if isinstance(i.element, kind))

    def aliases(self, kind: type[E]) -> dict[str, E]:
        return {i.alias: i.element for i in self.items if isinstance(i.element, kind)}

    def single(self, kind: type[E]) -> E | None:
        found = self.lists(kind)
        return found[0] if found else None


def merge(contributions: Iterable[Contributed]) -> MergedDomain:
    """Merge the elements of one guest.

    List elements are ordered by plugin, the core's first. Single elements are merged by field. None
    counts as unset. Contradictions raise Conflict.
    """
    given = list(contributions)
    for one in given:
        _check(one)
    if any(isinstance(one.element, Filesystem) for one in given):
        # vhost-user needs the guest's memory in a file that both processes map.
        needed = MemoryBacking(source="memfd", shared=True)
        given.append(Contributed(CORE, "vtorque-core: virtiofs", needed))
    given.sort(key=lambda c: (c.plugin != CORE, c.plugin))
    return MergedDomain((*_singles(given), *_lists(given)))


def _check(contributed: Contributed) -> None:
    element = contributed.element
    if not isinstance(element, Single | ListElement) or not dataclasses.is_dataclass(element):
        raise Refused(
            f"{contributed} returned a {type(element).__name__} for the domain, which is not an "
            "Element dataclass; report this to the plugin's authors"
        )
    if isinstance(element, ListElement) and not _NAME.fullmatch(element.name):
        raise Refused(
            f"{contributed} returned a {type(element).__name__} with the invalid name "
            f"{element.name!r}: use 1 to 80 letters, digits, _ and -; report this to the "
            "plugin's authors"
        )


def _lists(given: list[Contributed]) -> Iterator[Merged]:
    aliases: dict[str, Contributed] = {}
    taken: dict[tuple[type, str, Any], Contributed] = {}
    numbers: dict[type, int] = {}
    for one in given:
        element = one.element
        if not isinstance(element, ListElement):
            continue
        alias = f"ua-{one.plugin}-{element.name}"
        _claim(aliases, alias, one, f"an element with the alias {alias}")
        kind = type(element)
        for field in kind.unique:
            value = getattr(element, field)
            if value is not None:
                what = f"a {kind.__name__} with {field} {value!r}"
                _claim(taken, (kind, field, value), one, what)
        number = numbers.get(kind, 0)
        numbers[kind] = number + 1
        yield Merged(element, alias, number, (one.plugin,))


def _claim(claimed: dict[Any, Contributed], key: Any, one: Contributed, element: str) -> None:
    other = claimed.setdefault(key, one)
    if other is not one:
        providers = f"both {other} and {one}" if other.plugin != one.plugin else f"{one} twice"
        raise Conflict(f"{element} is provided by {providers}")


def _singles(given: list[Contributed]) -> Iterator[Merged]:
    groups: dict[type, list[Contributed]] = {}
    for one in given:
        if isinstance(one.element, Single):
            groups.setdefault(type(one.element), []).append(one)
    for kind in sorted(groups, key=lambda k: (k.__module__, k.__qualname__)):
        members = groups[kind]
        values = {f.name: _merge_field(kind, f.name, members) for f in dataclasses.fields(kind)}
        yield Merged(kind(**values), "", 0, tuple(dict.fromkeys(m.plugin for m in members)))


def _merge_field(kind: type, field: str, members: list[Contributed]) -> Any:
    opinions = [(m, getattr(m.element, field)) for m in members]
    opinions = [(m, value) for m, value in opinions if value is not None]
    for (first, one), (second, other) in itertools.pairwise(opinions):
        if (type(one), one) != (type(other), other):
            raise Conflict(
                f"{kind.__name__}.{field}: {first} wants {one!r}, {second} wants {other!r}; "
                "a job can have only one value"
            )
    return opinions[0][1] if opinions else None
