"""The job of a point: a shell script that runs the user's one, once, and notes how it ended.

What it notes are files in the point's directory, since every batch system tells of ended jobs in
its own way, and some not at all:

- ``claim``: a symbolic link to the job's id. It is made in one step, also on NFS, and whoever
  finds it made by another job runs nothing. So a point is never run twice, whatever was submitted.
- ``begun``: a line for each start (a batch system may start a job again): Unix time, seconds since
  the boot of the machine.
- ``machine``: what it ran on. ``stdout``, ``stderr``, ``metrics``: the script's.
- ``ended``: exit code and seconds since the boot, renamed into place when all else is there.

Busybox is enough for it. Seconds are those of /proc/uptime (0.01 s): no clock that is set
meanwhile is in them.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

from vtorque_experiment.definition import Scalar

CLAIM, BEGUN, ENDED, MACHINE = "claim", "begun", "ended", "machine"
STDOUT, STDERR, METRICS = "stdout", "stderr", "metrics"
_PREFIXES = (b"#PBS", b"#SBATCH", b"#VSUB", b"#OAR", b"#$")

_BODY = """\
cd {point} || exit 1
job=${{PBS_JOBID:-${{SLURM_JOB_ID:-${{VTORQUE_JOBID:-$$}}}}}}
if ! ln -s "$job" claim 2>/dev/null && [ "$(readlink claim)" != "$job" ]; then
    echo "vmgr experiment: nothing is run: $(readlink claim || echo nobody) has claimed" {point} >&2
    exit 1
fi
[ ! -e ended ] || exit 0
{{ uname -srm; hostname; sed -n 's/^model name[^:]*: *//p' /proc/cpuinfo | head -n 1; }} >machine
site=${{VTORQUE_METRICS:-}}
export VTORQUE_METRICS={point}/metrics
: >metrics
read -r start rest </proc/uptime
echo "$(date +%s) $start" >>begun || exit 1
{script} >stdout 2>stderr &
child=$!
cut=
trap 'cut=1; kill -TERM $child 2>/dev/null' TERM
wait $child
code=$?
if [ -n "$cut" ]; then
    wait $child
    code=143
fi
read -r stop rest </proc/uptime
[ -z "$site" ] || cat metrics >>"$site" 2>/dev/null
echo "$code $start $stop" >ended.new && mv ended.new ended
exit $code
"""


def script(directives: bytes, runs: Path, point: Path, environment: Mapping[str, Scalar]) -> bytes:
    """Return the job script. ``runs``: the copy of the user's; ``point``: an absolute directory."""
    lines = [f"export {name}={shlex.quote(text(value))}" for name, value in environment.items()]
    body = _BODY.format(point=shlex.quote(str(point)), script=shlex.quote(str(runs)))
    head = b"#!/bin/sh\n" + directives
    return head + "\n".join([*lines, body]).encode("utf-8", "surrogateescape")


def text(value: Scalar) -> str:
    """Return a value as ``-vm`` and scripts have it: ``true``, ``2``, ``1.5``, words."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def directives(content: bytes) -> bytes:
    """Return the option lines for the batch system and for vsub at a script's head."""
    found = []
    for line in content.splitlines():
        bare = line.strip()
        if bare and not bare.startswith((b"#", b":")):
            break
        if bare.startswith(_PREFIXES):
            found.append(bare + b"\n")
    return b"".join(found)
