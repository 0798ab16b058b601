"""``@dataclass(frozen=True)`` for what every ``vsub`` imports: the same, at a tenth of the cost.

:func:`dataclasses.dataclass` writes and compiles six methods for each class: a third of all that a
submission did. Here the methods are the same functions for all classes. Fields, defaults,
:func:`dataclasses.replace` and what else reads a dataclass work as with the standard one. A record
inherits from no dataclass; one that inherits from a record is a standard one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import dataclass
else:

    def dataclass(*, frozen: bool) -> Callable[[type[Any]], type[Any]]:
        """Return the decorator. ``frozen`` is True: there is no other kind here."""
        if not frozen:
            raise TypeError("a record is frozen")
        return _record


__all__ = ["dataclass", "setting"]


def setting(
    default: Any = dataclasses.MISSING,
    doc: str = "",
    unit: str | None = None,
    check: Callable[[Any], object] | None = None,
    *,
    secret_file: bool = False,
) -> Any:
    """Declare one key of the site config, such as a plugin's ``[plugin.<name>]``, as a field.

    Args:
        default: without one the key must be set by the site.
        doc: one line for ``vtorque config example``.
        unit: ``"MiB"`` or ``"s"``: the TOML value may then be a size or duration in text.
        check: called with a value other than the default; raises ValueError with what is wrong.
        secret_file: the value is the path of a file that only root may read.
    """
    about = {"doc": doc, "unit": unit, "check": check, "secret_file": secret_file}
    return dataclasses.field(default=default, metadata=about)


def _record(cls: type[Any]) -> type[Any]:
    """Make a frozen dataclass of ``cls``, which inherits from none."""
    made = dataclasses.dataclass(init=False, repr=False, eq=False)(cls)
    for method in (__init__, __repr__, __eq__, __hash__, __setattr__, __delattr__):
        if vars(cls).get(method.__name__) is None:  # __hash__ is, where the class has an __eq__
            setattr(made, method.__name__, method)
    made.__dataclass_params__.frozen = True  # for a frozen dataclass that inherits from it
    return made


def __init__(self: Any, /, *args: Any, **given: Any) -> None:
    fields = [f for f in dataclasses.fields(self) if f.init]
    name = type(self).__name__
    if len(args) > len(fields):
        raise TypeError(f"{name} has {len(fields)} fields, {len(args)} were given")
    for number, field in enumerate(fields):
        if number < len(args):
            if field.name in given:
                raise TypeError(f"{name}: {field.name} is given twice")
            value = args[number]
        elif field.name in given:
            value = given.pop(field.name)
        elif field.default is not dataclasses.MISSING:
            value = field.default
        elif field.default_factory is not dataclasses.MISSING:
            value = field.default_factory()
        else:
            raise TypeError(f"{name}: {field.name} is missing")
        object.__setattr__(self, field.name, value)
    if given:
        raise TypeError(f"{name} has no field {next(iter(given))}")
    if hasattr(self, "__post_init__"):
        self.__post_init__()


def _compared(self: Any) -> tuple[Any, ...]:
    return tuple(getattr(self, f.name) for f in dataclasses.fields(self) if f.compare)


def __repr__(self: Any) -> str:
    shown = (f"{f.name}={getattr(self, f.name)!r}" for f in dataclasses.fields(self) if f.repr)
    return f"{type(self).__qualname__}({', '.join(shown)})"


def __eq__(self: Any, other: object) -> bool:
    if type(other) is not type(self):
        return NotImplemented
    return _compared(self) == _compared(other)


def __hash__(self: Any) -> int:
    hashed = (f for f in dataclasses.fields(self) if (f.compare if f.hash is None else f.hash))
    return hash(tuple(getattr(self, f.name) for f in hashed))


def __setattr__(self: Any, name: str, value: object) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")


def __delattr__(self: Any, name: str) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")
