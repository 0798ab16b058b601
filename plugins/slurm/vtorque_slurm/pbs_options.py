"""Reject PBS options that sbatch would misinterpret.

Options that are also useful in Slurm, such as ``-q`` and ``-t``, are not rejected.
"""

from __future__ import annotations

import re
from pathlib import Path

from vtorque_core.api import UsageError, printable
from vtorque_slurm.options import CommandLine

_WITH_VALUE = ("-Wblock=", "-Wdepend=")  # sbatch parses -W, then the rest as -b or -d


def refuse(line: CommandLine) -> None:
    """Raise UsageError for an option of PBS's qsub.

    The message names Slurm's equivalent (sbatch(1)).
    """
    first = line.operands[0] if line.operands else ""
    before = line.options[-1][0] if line.options else ""
    pair = first if re.match(r"[A-Za-z_]\w*=", first) and not Path(first).exists() else ""
    glued = next((word[2:] for word in line.words if word.startswith(_WITH_VALUE)), "")
    value = glued or (pair if before == "wait" else "")
    nodes, cores = line.last_value("nodes") or "", line.last_value("core-spec") or ""
    if value:
        _refuse(
            f"-W {value}",
            "-W is --wait, which takes no value",
            "to wait for the job's end use --wait, for other jobs --dependency=...",
        )
    if pair and before == "verbose":
        _refuse(f"-v {pair}", "-v is --verbose, which takes no value", f"write --export=ALL,{pair}")
    if first and "-V" in line.words:
        _refuse(
            f"-V {first}",
            "-V prints sbatch's version and does not submit the job",
            "leave it out, because jobs get the environment by default",
        )
    if nodes[:1].isalpha():
        _refuse(f"-N {nodes}", "-N is --nodes, a number", f"write --job-name={nodes}")
    if cores.startswith("/"):
        _refuse(
            f"-S {cores}",
            "-S is --core-spec, a number",
            "name the shell in the script's first line",
        )


def _refuse(given: str, meaning: str, fix: str) -> None:
    raise UsageError(
        f"{printable(given, 80)} is PBS syntax: on Slurm {meaning}; {printable(fix, 120)}"
    )
