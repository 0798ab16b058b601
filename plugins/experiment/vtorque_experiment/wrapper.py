"""The job of a point: a shell script that runs the user's script once and records its end.

Batch systems report ended jobs differently or not at all. Therefore the script records its progress
in files of the point's directory:

- ``claim``: a symbolic link with the job id as its target. Creating a link is atomic, also on NFS.
  A job that finds the claim of another job runs nothing, so no point runs twice.
- ``begun``: the last start (a batch system may restart a job) in Unix time and in uptime.
- ``machine``: kernel, host name and CPU model. ``stdout``, ``stderr``, ``metrics``: the output.
- ``ended``: exit status, and uptime at start and end. It is written last, by a rename.

On bare metal this script runs on the host, in a directory where guests can write. Therefore it
checks the SHA-256 of a private copy of the user's script, and runs that copy. It enters no
directory through a symbolic link, and writes only files that it creates (``set -C``). If /tmp is
mounted noexec, the script runs the copy with the interpreter of the ``#!`` line.

The script needs only busybox. It reads the uptime from /proc/uptime (in 0.01 s), which does not
change when the clock is set.
"""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Mapping
from pathlib import Path

from vtorque_experiment.definition import Scalar

CLAIM, BEGUN, ENDED, MACHINE = "claim", "begun", "ended", "machine"
STDOUT, STDERR, METRICS = "stdout", "stderr", "metrics"
_PREFIXES = (b"#PBS", b"#SBATCH", b"#VSUB", b"#OAR", b"#$")

_BODY = """\
top=$(cd {top} && pwd -P) && cd {point} || exit 1
if [ "$(pwd -P)" != "$top/"{below} ]; then
    echo "vmgr experiment: nothing is run: a part of this path is a symbolic link:" {point} >&2
    exit 1
fi
job=${{PBS_JOBID:-${{SLURM_JOB_ID:-${{VTORQUE_JOBID:-$$}}}}}}
if ! ln -s "$job" claim 2>/dev/null && [ "$(readlink claim)" != "$job" ]; then
    echo "vmgr experiment: nothing is run: $(readlink claim || echo nobody) has claimed" {point} >&2
    exit 1
fi
[ ! -e ended ] || exit 0
path=$PATH
PATH=/usr/bin:/bin
own=$(mktemp -d /tmp/vtorque.XXXXXX) || exit 1
trap 'rm -rf "$own"' EXIT
run=$own/{name}
head -c {size} {script} >"$run"
if ! echo "{sum}  $run" | sha256sum -c >/dev/null 2>&1; then
    echo "vmgr experiment: nothing is run: this script was changed after vmgr experiment run:" \
        {script} >&2
    exit 1
fi
chmod 700 "$run"
set -- "$run"
if [ ! -x "$run" ]; then
    read -r line <"$run"
    case $line in
    "#!"*) set -- ${{line#??}} "$run" ;;
    *) set -- /bin/sh "$run" ;;
    esac
fi
rm -f machine metrics begun stdout stderr ended.new
set -C
{{ uname -srm; hostname; sed -n 's/^model name[^:]*: *//p' /proc/cpuinfo | head -n 1; }} >machine
site=${{VTORQUE_METRICS:-}}
export VTORQUE_METRICS={point}/metrics
: >metrics
read -r start rest </proc/uptime
echo "$(date +%s) $start" >begun || exit 1
PATH=$path
"$@" >stdout 2>stderr &
child=$!
cut=
trap 'cut=1; kill -TERM $child 2>/dev/null' TERM
wait $child
code=$?
if [ -n "$cut" ]; then
    wait $child
    code=143
fi
PATH=/usr/bin:/bin
read -r stop rest </proc/uptime
[ -z "$site" ] || [ -h metrics ] || cat metrics >>"$site" 2>/dev/null
rm -f ended.new
echo "$code $start $stop" >ended.new && mv ended.new ended
exit $code
"""


def script(
    content: bytes, runs: Path, point: Path, environment: Mapping[str, Scalar]
) -> bytes:  # fmt: skip
    """Return the script to submit for a point. It runs the user's script.

    Args:
        content: the user's script.
        runs: the copy of the user's script in the results directory. The job runs this copy, but
            only if the copy still equals ``content``.
        point: the point's directory, see :meth:`vtorque_experiment.place.ResultsDirectory.point`.
        environment: variables of the user's script.
    """
    lines = [f"export {name}={shlex.quote(text(value))}" for name, value in environment.items()]
    body = _BODY.format(
        top=shlex.quote(str(point.parents[2])), below=shlex.quote("/".join(point.parts[-3:])),
        point=shlex.quote(str(point)), script=shlex.quote(str(runs)), name=shlex.quote(runs.name),
        size=len(content) + 1, sum=hashlib.sha256(content).hexdigest(),
    )  # fmt: skip
    head = b"#!/bin/sh\n" + directives(content)
    return head + "\n".join([*lines, body]).encode("utf-8", "surrogateescape")


def text(value: Scalar) -> str:
    """Format a value for ``-vm`` and scripts; a Boolean becomes ``true`` or ``false``."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def directives(content: bytes) -> bytes:
    """Return the directives for the batch system and for vsub at the head of a script."""
    found = []
    for line in content.splitlines():
        bare = line.strip()
        if bare and not bare.startswith((b"#", b":")):
            break
        if bare.startswith(_PREFIXES):
            found.append(bare + b"\n")
    return b"".join(found)
