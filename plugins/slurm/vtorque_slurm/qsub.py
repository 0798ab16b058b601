"""``vsub`` for Slurm's ``qsub`` wrapper (slurm-wlm-torque), which runs sbatch or salloc.

The wrapper searches its own directory for both commands. vsub therefore starts the wrapper through
a link in a temporary directory. In this directory, sbatch and salloc are scripts that run an inner
``vsub`` with the ``-vm`` options.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from vtorque_core.api import UsageError, printable
from vtorque_core.api.batch_system import JobInfo, Needs, SubmitArgs
from vtorque_core.api.directives import vm_directives
from vtorque_slurm.submitter import SlurmSubmitter, read_script

INNER = "VTORQUE_SLURM_SBATCH"
"""Set if ``vsub`` stands in for sbatch or salloc."""

# Options of the wrapper (Getopt::Long, 22.05): no bundling, and the first operand ends them.
_VALUE = (*"aAbeJlmMNopPqrStvW", "wd")
_FLAGS = ("cwd", "h", "I", "V", "help", "?", "man", "sbatchline")


class QsubSubmitter:
    """Implementation of :class:`vtorque_core.api.batch_system.Submitter` for the qsub wrapper."""

    naming = "-N"

    def __init__(self, sbatch: SlurmSubmitter) -> None:
        self._sbatch = sbatch

    def split(self, argv: Sequence[str]) -> SubmitArgs:
        """Extract the ``-vm`` options; the other arguments are for Slurm's qsub wrapper."""
        vm: list[str] = []
        rest: list[str] = []
        found: dict[str, str] = {}
        words = list(argv)
        while words and words[0].startswith("-") and words[0] not in ("-", "--"):
            word = words.pop(0)
            if word == "-vm":
                vm.append(_take(word, words))
                continue
            name, equals, value = word.lstrip("-").partition("=")
            taken = [word]
            if name == "pe":
                taken += [_take(word, words) for _ in range(1 if equals else 2)]
            elif name == "j" and not equals and words and not words[0].startswith("-"):
                taken.append(words.pop(0))
            elif name in _VALUE and not equals:
                value = _take(word, words)
                taken.append(value)
            elif name not in (*_VALUE, *_FLAGS, "j"):
                raise UsageError(f"option {printable(word, 60)} is unknown to Slurm's qsub")
            found[name] = value
            rest += taken
        script = words[0] if words and "y" not in found.get("b", "") else None
        content = read_script(script) if script else b""
        return SubmitArgs(
            vm=tuple(vm),
            rest=(*rest, *words),
            script=script,
            interactive="I" in found,
            directives=vm_directives(content),
        )

    def submit(self, args: SubmitArgs, blob: bytes | None, needs: Needs | None) -> int:
        """Run Slurm's qsub wrapper, which then runs ``vsub`` where it would run sbatch or salloc.

        Return the wrapper's exit status.
        """
        qsub = self._sbatch.program("qsub")
        vm = args.vm or (() if blob else ("none",))
        inner = shlex.join([_vsub_path(), *(word for each in vm for word in ("-vm", each))])
        with tempfile.TemporaryDirectory(prefix="vsub-") as top:
            Path(top, "qsub").symlink_to(Path(qsub).resolve())
            Path(top, "srun").symlink_to(self._sbatch.program("srun"))
            for name, flag in (("sbatch", ""), ("salloc", " -I")):
                text = f'#!/bin/sh\n{INNER}=1 exec {inner}{flag} "$@"\n'
                Path(top, name).write_text(text)
                Path(top, name).chmod(0o700)
            code = subprocess.run([Path(top, "qsub"), *args.rest], check=False).returncode
        return code if code >= 0 else 128 - code

    def jobs(self) -> Iterable[JobInfo]:
        """Return the jobs that squeue lists."""
        return self._sbatch.jobs()

    def cancel(self, job_id: str) -> int:
        """Run scancel and return its exit status."""
        return self._sbatch.cancel(job_id)


def is_inner() -> bool:
    """Return True if Slurm's qsub wrapper has run this ``vsub`` instead of sbatch or salloc."""
    return INNER in os.environ


def _take(option: str, words: list[str]) -> str:
    if not words:
        raise UsageError(f"option {printable(option, 60)}: a value is missing")
    return words.pop(0)


def _vsub_path() -> str:
    vsub = Path(sys.prefix, "bin", "vsub")
    if not vsub.exists():
        raise UsageError(f"{vsub} was not found, so qsub cannot run it")
    return str(vsub)
