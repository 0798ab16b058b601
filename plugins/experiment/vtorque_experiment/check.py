"""Find the combinations that vsub would refuse: call ``vsub --dry-run`` before a run."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from vtorque_core.api import name_errors, printable
from vtorque_experiment import batch as b
from vtorque_experiment import wrapper
from vtorque_experiment.create import source
from vtorque_experiment.definition import Definition
from vtorque_experiment.matrix import Cell

_AT_ONCE = ("vsub: warning: ", "vsub: building the image micro")  # passed on immediately
MOST = 50  # calls of vsub, of about half a second each


def find_refused(
    file: Path, definition: Definition, cells: Sequence[Cell], batch: b.BatchCommands,
    told: Callable[[str], None],
) -> Mapping[int, str]:  # fmt: skip
    """Return vsub's message for each combination that vsub would refuse, by combination index.

    One call of vsub checks all combinations that differ only in variables of the script. vsub is
    called at most :data:`MOST` times.

    ``told`` is called with messages of vsub that are no refusals: warnings, errors, and the message
    that vsub builds the missing image ``micro``. If vsub did not check all combinations, the last
    call of ``told`` says how many combinations vsub checked.

    Privileges: the user.

    Raises:
        Refused: a script cannot be read.
        HostFault: vsub cannot be started.
    """
    found: dict[int, str] = {}
    said: dict[tuple[str, ...], str] = {}
    warned: set[str] = set()
    unasked = 0

    def report_once(line: str) -> None:
        if line not in warned:
            warned.add(line)
            told(line)

    jobs = {
        name: b"#!/bin/sh\n" + wrapper.directives(source(file.parent / name))
        for name in definition.scripts
    }
    with tempfile.TemporaryDirectory(prefix="vtorque-experiment-") as scratch:
        top = Path(scratch)
        for number, cell in enumerate(cells):
            name = str(cell.get("script", definition.scripts[0]))
            argv = b.arguments((batch.naming, "x"), definition, cell, top)
            question = (name, *argv)
            if question not in said:
                if len(said) == MOST:
                    unasked += 1
                    continue
                said[question] = _find_refusal(batch, argv, jobs[name], top, report_once)
            if said[question]:
                found[number] = said[question]
    if unasked:
        told(f"vsub checked {len(cells) - unasked} of {len(cells)} combinations")
    return found


def _find_refusal(
    batch: b.BatchCommands, argv: Sequence[str], script: bytes, top: Path,
    told: Callable[[str], None],
) -> str:  # fmt: skip
    """Return why ``vsub --dry-run`` refuses the job, or an empty string.

    vsub runs in the directory ``top``. Its other messages are passed to ``told``.
    """
    lines = []
    with name_errors(batch.vsub[0]), tempfile.TemporaryFile() as stdin, subprocess.Popen(
        [*batch.vsub, "--dry-run", *argv], stdin=_fill(stdin, script),
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd=top,
    ) as asked:  # fmt: skip
        for raw in asked.stderr or ():
            line = printable(raw.decode("utf-8", "replace").rstrip("\n"), 400)
            if line.startswith(_AT_ONCE):
                told(line)
            elif line:
                lines.append(line)
    if asked.returncode == b.REFUSED:
        return " | ".join(lines) or f"vsub ended with exit code {b.REFUSED}"
    for line in lines if asked.returncode else ():  # on success, these are steps of an image build
        told(line)
    return ""


def _fill(file: IO[bytes], content: bytes) -> IO[bytes]:
    file.write(content)
    file.seek(0)
    return file
