"""What methods of dataclasses Python compiles."""

import sys
from collections.abc import Iterator
from types import CodeType

_METHODS = {"__init__", "__repr__", "__eq__", "__hash__", "__setattr__", "__delattr__"}


def noted() -> list[str]:
    """Return a list that from now on gets each method that is compiled while the program runs.

    By an audit hook (PEP 578), which cannot be removed. ``dataclasses`` executes the text of its
    methods: since Python 3.13 that of one empty function where there is none to make.
    """
    found: list[str] = []

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        code = arguments[0] if event == "exec" else None
        if isinstance(code, CodeType) and code.co_filename == "<string>":
            found.extend(each for each in _names(code) if each in _METHODS)

    sys.addaudithook(watch)
    return found


def _names(code: CodeType) -> Iterator[str]:
    yield code.co_name
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _names(each)
