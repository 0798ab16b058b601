"""Which name was meant by one that does not exist; for error messages only."""

from __future__ import annotations

from collections.abc import Iterable


def closest(name: str, known: Iterable[str], most: int = 1) -> list[str]:
    """Return at most ``most`` of the known names, the likeliest first; none may be close.

    Two letters in the wrong order are the commonest slip, and difflib rates it low: by its ratio
    ``rma`` is as near to ``vrdma`` as to ``ram``.
    """
    from difflib import get_close_matches  # noqa: PLC0415 (12 ms)

    word, names = name.lower()[:64], {each.lower(): each for each in sorted(known)}
    swapped = {word[:i] + word[i + 1] + word[i] + word[i + 2 :] for i in range(len(word) - 1)}
    first = [each for each in names if each in swapped]
    found = dict.fromkeys(first + get_close_matches(word, names, most))
    return [names[each] for each in found][:most]


def hint(name: str, known: Iterable[str], otherwise: str) -> str:
    """Return ``did you mean NAME?``, or ``otherwise`` where none of the known names is close."""
    close = closest(name, known)
    return f"did you mean {close[0]}?" if close else otherwise
