"""370 realistic job scripts: ``SCRIPTS``.

Most of them are in the files ``wild/*.txt``, one file per kind. A line ``%%%% NAME [micro|hpc]``
starts each script. Scripts with bytes that an editor or a diff would damage are in
:mod:`vtorque_testing.wild_bytes`.

The word after NAME is the smallest image with which the script works: ``micro`` (busybox
and bash), or ``hpc`` (``doc/recipes/hpc.toml``). In that image, the script has the same output,
exit status and files as on a Debian host with the same packages. A script without this word
needs another image or a batch system other than ``local``, or ``vsub`` refuses it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from vtorque_testing.wild_bytes import RUNS, make_scripts

Where = Literal["", "micro", "hpc"]

_DIRECTORY = Path(__file__).with_name("wild")
_MARK = "%%%% "


@dataclass(frozen=True)
class WildScript:
    """A job script. ``runs`` names the smallest image with which it works; empty if none."""

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
    return found + [
        WildScript(n, c, cast(Where, RUNS.get(n, ""))) for n, c in make_scripts().items()
    ]


SCRIPTS: tuple[WildScript, ...] = tuple(_load())


def select_few(scripts: Iterable[WildScript]) -> tuple[list[WildScript], list[WildScript]]:
    """Return every 24th script, for quick tests, and all other scripts."""
    found = list(scripts)
    return found[::24], [script for number, script in enumerate(found) if number % 24]
