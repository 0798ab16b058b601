"""150 job scripts as users have them: ``SCRIPTS``.

Most are in the text files of ``wild/``, one after the other, each behind a line
``%%%% NAME [micro|debian]``. Those whose bytes an editor or a diff would spoil are in
:mod:`vtorque_testing.wild_bytes`. The last word says where a script also runs, with the same
output and exit code as on a Debian host: in every guest (``micro`` has busybox), or in one that
has what a Debian base system has.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from vtorque_testing.wild_bytes import RUNS, made

Where = Literal["", "micro", "debian"]

_DIRECTORY = Path(__file__).with_name("wild")
_MARK = "%%%% "


@dataclass(frozen=True)
class WildScript:
    """One script. ``runs``: the smallest guest that it runs in; empty: it needs more."""

    name: str
    content: bytes
    runs: Where


def _load() -> list[WildScript]:
    found = []
    for path in sorted(_DIRECTORY.glob("*.txt")):
        for part in f"\n{path.read_text()}".split(f"\n{_MARK}")[1:]:
            head, _, text = part.partition("\n")
            name, _, where = head.partition(" ")
            text = text.rstrip("\n") + "\n"
            found.append(WildScript(name, text.encode(), cast(Where, where)))
    return found + [WildScript(n, c, cast(Where, RUNS.get(n, ""))) for n, c in made().items()]


SCRIPTS: tuple[WildScript, ...] = tuple(_load())


def each_twelfth(scripts: Iterable[WildScript]) -> tuple[list[WildScript], list[WildScript]]:
    """Return each twelfth, to be quick, and the others."""
    found = list(scripts)
    return found[::12], [script for number, script in enumerate(found) if number % 12]
