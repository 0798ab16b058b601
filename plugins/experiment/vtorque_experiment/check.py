"""Ask vsub, before anything is made, which combinations it would refuse (``vsub --dry-run``)."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from vtorque_core.api import HostFault, printable
from vtorque_experiment import batch as b
from vtorque_experiment import wrapper
from vtorque_experiment.create import source
from vtorque_experiment.definition import Definition
from vtorque_experiment.matrix import Cell

MOST = 50  # questions, of some half a second each


def refused(
    file: Path, definition: Definition, cells: Sequence[Cell], batch: b.Batch,
    told: Callable[[str], None],
) -> Mapping[int, str]:  # fmt: skip
    """Return which combinations vsub would refuse, by their numbers, each with what it says.

    It is asked once for all that differ in the script's variables alone, and at most
    :data:`MOST` times. ``told`` is called with its warnings, and with what is not known then. As
    the user. Raises Refused: a script cannot be read; HostFault: vsub cannot be started.
    """
    found: dict[int, str] = {}
    said: dict[tuple[str, ...], str] = {}
    warned: set[str] = set()
    unasked = 0
    with tempfile.TemporaryDirectory(prefix="vtorque-experiment-") as scratch:
        top = Path(scratch)
        jobs = {}
        for number, name in enumerate(definition.scripts):
            jobs[name] = top / f"{number}.sh"
            head = b"#!/bin/sh\n" + wrapper.directives(source(file.parent / name))
            jobs[name].write_bytes(head)
        for number, cell in enumerate(cells):
            job = jobs[str(cell.get("script", definition.scripts[0]))]
            argv = tuple(b.arguments((batch.naming, "x"), definition, cell, top, job))
            if argv not in said:
                if len(said) == MOST:
                    unasked += 1
                    continue
                said[argv], warnings = _asked(batch, argv)
                for line in warnings:
                    if line not in warned:
                        warned.add(line)
                        told(line)
            if said[argv]:
                found[number] = said[argv]
    if unasked:
        told(f"vsub was asked for {len(cells) - unasked} of {len(cells)} combinations")
    return found


def _asked(batch: b.Batch, argv: Sequence[str]) -> tuple[str, list[str]]:
    """Return why vsub refuses, empty if it does not, and what else it says."""
    try:
        done = subprocess.run(
            [*batch.vsub, "--dry-run", *argv], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE, check=False,
        )  # fmt: skip
    except OSError as error:
        raise HostFault(f"{batch.vsub[0]}: {error.strerror}") from None
    lines = [printable(line, 400) for line in done.stderr.decode("utf-8", "replace").splitlines()]
    if done.returncode == b.REFUSED:
        return " | ".join(line for line in lines if line) or f"vsub ended with {b.REFUSED}", []
    warnings = [line for line in lines if done.returncode or line.startswith("vsub: warning: ")]
    return "", warnings  # the first job's image is made meanwhile, and says much
