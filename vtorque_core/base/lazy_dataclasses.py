"""Compile the methods of dataclasses at their first call, in the hooks and the job shell.

``@dataclass`` compiles up to six methods of each class at import. A hook imports 160 such classes,
and calls few of these methods: a quarter of its CPU time.
"""

import dataclasses
from collections.abc import Callable
from typing import Any


def defer() -> None:
    """Change how the standard decorator creates methods of later classes in this process.

    Has no effect with Python 3.13, which compiles all methods of a class at once.
    """
    create = getattr(dataclasses, "_create_fn", None)
    if create is not None:
        setattr(dataclasses, "_create_fn", lambda *args, **how: _deferred(create, args, how))  # noqa: B010


def _deferred(
    create: Callable[..., Callable[..., Any]], args: tuple[Any, ...], how: dict[str, Any]
) -> Callable[..., Any]:
    made: Callable[..., Any] | None = None

    def method(*given: Any, **named: Any) -> Any:
        nonlocal made
        if made is None:
            made = create(*args, **how)
            made.__qualname__ = method.__qualname__  # for the TypeError of wrong arguments
        return made(*given, **named)

    method.__name__ = args[0]
    return method
