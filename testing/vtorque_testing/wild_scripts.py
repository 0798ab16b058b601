"""370 job scripts as users have them: ``SCRIPTS``.

Most are in the text files of ``wild/``, by kind and one after the other, each behind a line ``%%%%
NAME [micro|hpc]``. Those whose bytes an editor or a diff would spoil are in
:mod:`vtorque_testing.wild_bytes`. Each is written anew in the manner of public ones, cut down to
what is characteristic. The last word says where a script also runs, with the same output, exit code
and files as on a Debian host with the same packages: in every guest (``micro`` has busybox and
bash), or in one of the image of ``doc/recipes/hpc.toml``. Without it a script needs what neither
has, or asks for what the batch system ``local`` has not, or for less memory than a guest needs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from vtorque_testing.wild_bytes import RUNS, made

Where = Literal["", "micro", "hpc"]

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


def a_few(scripts: Iterable[WildScript]) -> tuple[list[WildScript], list[WildScript]]:
    """Return every 24th, to be quick, and the others."""
    found = list(scripts)
    return found[::24], [script for number, script in enumerate(found) if number % 24]
