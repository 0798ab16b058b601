"""Generate the Prolog and Epilog scripts, which slurmd runs as root on the nodes.

For a bare-metal job, each script starts no program except its shell.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from vtorque_admin.steps import hook_script
from vtorque_core.api.setup_steps import Installation
from vtorque_slurm import request_channel


def prolog(place: Installation) -> bytes:
    """Return the Prolog script.

    If the prologue fails, the script releases the job's resources at once. For jobs of vsub, it
    still exits with 0, because Slurm drains a node whose Prolog fails. The job shell then finds no
    proof file and ends the job. If the request came from the SPANK plugin, the script exits with an
    error, because slurmd might start the job without the SPANK plugin, and thus without the job
    shell.
    """
    request = f"${request_channel.FROM_SPANK}"
    guard = f"case $SLURM_JOB_COMMENT{request} in *vt1:*) ;; *) exit 0 ;; esac"
    release = f'{_call(place, "epilogue")} "$SLURM_JOB_ID"'
    return hook_script(
        guard,
        f"{_call(place, 'prologue')} && exit 0",
        release,
        f'[ -z "{request}" ]',
    )


def epilog(place: Installation, journal: Path, proofs: Path) -> bytes:
    """Return the Epilog script, which runs the epilogue if the job has a journal or a proof.

    The script does not read the job's comment, and always exits with 0. The reaper retries failed
    releases.
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
