"""Prolog and Epilog, which slurmd runs as root on the nodes. Pure: text only.

A bare-metal job pays for a shell and one built-in test.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from vtorque_core.api.setup_steps import Installation, hook_script


def prolog(place: Installation) -> bytes:
    """Return the Prolog. It never fails: Slurm would drain the node.

    What a killed prologue has left is released at once; the job shell then finds no proof.
    """
    guard = "case $SLURM_JOB_COMMENT in *vt1:*) ;; *) exit 0 ;; esac"
    release = f'{_call(place, "epilogue")} "$SLURM_JOB_ID"'
    return hook_script(guard, f"{_call(place, 'prologue')} || {release}", "exit 0")


def epilog(place: Installation, journal: Path, proofs: Path) -> bytes:
    """Return the Epilog: it looks for what a job has left here, whatever its comment says now.

    It never fails either; what could not be released the reaper tries again.
    """
    journals = f'{shlex.quote(str(journal))}/"$SLURM_JOB_ID".*.jsonl'
    proof = f'{shlex.quote(str(proofs))}/"$SLURM_JOB_ID".json'
    return hook_script(
        f"for file in {journals} {proof}; do",
        '  [ -e "$file" ] || continue',
        f'  {_call(place, "epilogue")} "$SLURM_JOB_ID"',
        "  exit 0",
        "done",
        "exit 0",
    )


def _call(place: Installation, hook: str) -> str:
    return shlex.join(place.hook(hook))
