"""-vm pci=gpu:1+fpga:2: cards of the site's classes for each guest. Limits: [options.pci]."""

from __future__ import annotations

import re

from vtorque_core.api import Option, always

CLASS = r"[a-z][a-z0-9_-]{0,31}"
_CARD = re.compile(rf"({CLASS})(?::([1-9][0-9]?))?", re.ASCII)
_RAW = re.compile(r"(?:[0-9a-f]{4,8}:)?[0-9a-f]{2,4}:[0-9a-f]{2,4}(?:\.[0-7])?", re.ASCII)


def cards(text: str) -> dict[str, int]:
    """Return class to number of cards; of no text none.

    Raises ValueError for what is no list of them, and for PCI addresses: which card a job gets is
    the site's word and the ledger's.
    """
    wanted: dict[str, int] = {}
    for word in (w.strip() for w in text.split("+")) if text else ():
        if _RAW.fullmatch(word.lower()):
            raise ValueError(
                f"has {word}, a PCI address or device number, and these are never taken from "
                "users: name a class of cards that the site has defined, like gpu:1"
            )
        match = _CARD.fullmatch(word)
        if match is None or match[1] in wanted:
            raise ValueError(
                "is not a list of cards: write CLASS:NUMBER, NUMBER from 1 to 99, each class once, "
                "with + between several, like gpu:1+fpga:2"
            )
        wanted[match[1]] = int(match[2] or 1)
    return wanted


def card_list(text: str) -> str:
    """Return the one way to write these cards, sorted; [options.pci] allow is for each of them."""
    return "+".join(f"{name}:{number}" for name, number in sorted(cards(text).items()))


PCI = Option(
    "pci", card_list, "", "PCI cards of each guest, by class", "CLASS:N[+CLASS:N]", separator="+"
)
vtorque_options = always(PCI)
