"""Parse the options in a job script as sbatch 22.05 does.

Option lines start in the first column, and precede the first command of the script. Quotes and
backslashes are removed; a word that starts with ``#`` ends the line. ``#SBATCH`` lines override
``#PBS`` and ``#BSUB`` lines.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

from vtorque_core.api import UsageError
from vtorque_slurm.options import SBATCH, CommandLine, OptionTable, read

SHEBANG = b"#!"
_OTHERS = ("#PBS", "#BSUB")


def looks_like_script(content: bytes) -> bool:
    """Return whether the content starts with ``#!``. sbatch rejects any other script."""
    return content.startswith(SHEBANG)


def components(content: bytes, table: OptionTable = SBATCH) -> list[CommandLine]:
    """Return the options of the ``#SBATCH`` lines for each component of the job, in order.

    Invalid lines are skipped, because sbatch itself reports them.
    """
    found: list[list[tuple[str, str]]] = [[]]
    for line in _iter_directives(content, "#SBATCH"):
        if line.strip() in ("hetjob", "packjob"):
            found.append([])
            continue
        with contextlib.suppress(UsageError):
            found[-1] += read(words(line), table).options
    return [CommandLine(options=tuple(each)) for each in found]


def options_of_dialects(content: bytes) -> frozenset[str]:
    """Return which of ``job-name``, ``mem`` and ``time`` are set in ``#PBS`` or ``#BSUB`` lines."""
    text = "\n".join(line for prefix in _OTHERS for line in _iter_directives(content, prefix))
    found = {
        "job-name": r"(?:^|\s)-[NJ]",
        "mem": r"(?:^|[\s,:])p?v?mem=|(?:^|\s)-M",
        "time": r"walltime=|(?:^|\s)-W",
    }
    return frozenset(n for n, pattern in found.items() if re.search(pattern, text, re.MULTILINE))


def words(line: str) -> list[str]:
    """Split an option line as sbatch does."""
    found: list[str] = []
    word: list[str] | None = None
    quote = ""
    escaped = False
    for char in line:
        if escaped:
            word = [*(word or []), char]
            escaped = False
        elif char == "\\" and quote != "'":
            escaped = True
        elif quote:
            if char == quote:
                quote = ""
            else:
                word = [*(word or []), char]
        elif char in "'\"":
            quote = char
            word = word or []
        elif char.isspace():
            if word is not None:
                found.append("".join(word))
            word = None
        elif char == "#" and word is None:
            break
        else:
            word = [*(word or []), char]
    return found if word is None else [*found, "".join(word)]


def _iter_directives(content: bytes, prefix: str) -> Iterator[str]:
    for raw in content.split(b"\n"):
        line = raw.decode("utf-8", "surrogateescape")
        if line.startswith(prefix) and line[len(prefix) : len(prefix) + 1].isspace():
            yield line[len(prefix) :]
        elif line.strip() and not line.lstrip().startswith("#"):
            return
