"""Suggest existing names for a mistyped name, for error messages."""

from __future__ import annotations

from collections.abc import Iterable


def closest_names(name: str, known: Iterable[str], most: int = 1) -> list[str]:
    from difflib import get_close_matches  # noqa: PLC0415 (12 ms)

    word, names = name.lower()[:64], {each.lower(): each for each in sorted(known)}
    swapped = {word[:i] + word[i + 1] + word[i] + word[i + 2 :] for i in range(len(word) - 1)}
    first = [each for each in names if each in swapped]
    found = dict.fromkeys(first + get_close_matches(word, names, most))
    return [names[each] for each in found][:most]


def hint(name: str, known: Iterable[str], otherwise: str) -> str:
    close = closest_names(name, known)
    return f"did you mean {close[0]}?" if close else otherwise
