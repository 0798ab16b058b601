"""Generate the four scripts that Torque's pbs_mom runs as root on the nodes.

For bare-metal jobs, each script uses only shell built-ins, and runs the site's own script.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from vtorque_admin.steps import KEPT, MARK
from vtorque_core.api.setup_steps import Installation
from vtorque_pbs.torque.node import RETRY

_PROLOGUE = """\
#!/bin/sh
# {mark}: starts the guests of VM jobs; the site's own {name} runs first.
site={site}
case $5 in
  *other=*vt1:* | *other=*vt1v:*) ;;
  *) [ -x "$site" ] && exec "$site" "$@"; exit 0 ;;
esac
if [ -x "$site" ]; then "$site" "$@" || exit $?; fi
log={log}$$
{vtorque} prologue {kind} "$@" 2>"$log"
code=$?
# Killed before it wrote a proof: the second try first releases what the first has left.
if [ $code -gt 128 ] && [ ! -e {proof}/"$1.json" ]; then
  {vtorque} prologue {kind} "$@" 2>"$log"
  code=$?
fi
# vtorque returns before the guests are ready. With any code but {retry} the job starts, and the job
# shell reports why there are no guests. If this script failed instead, Torque would start the job
# again and again, or take the node down.
case $code in
  0 | {retry}) [ -s "$log" ] && logger -t vtorque -f "$log" ;;
  *) cat "$log" >&2 ;;
esac
rm -f "$log"
[ $code -eq {retry} ] && exit {requeue}
exit 0
"""

_EPILOGUE = """\
#!/bin/sh
# {mark}: releases what VM jobs have; the site's own {name} runs afterwards.
site={site}
journal={journal}
proof={proof}
# By vTorque's own files, not by the resources: their owner can change those while the job runs.
name=$1
case $1 in *[!A-Za-z0-9._-]* | .* | -* | '') name='j*' ;; esac
[ "${{#1}}" -le 50 ] || name='j*'
for found in "$journal"/$name.* "$proof"/$name.json; do
  [ -e "$found" ] || continue
  {vtorque} epilogue "$@"
  break
done
[ -x "$site" ] && exec "$site" "$@"
exit 0
"""


def prologue(place: Installation, path: Path, kind: str, proof: Path) -> bytes:
    """Return the script ``prologue`` or ``prologue.parallel``, which passes ``kind`` to vTorque."""
    return _PROLOGUE.format(
        mark=f"Written by {MARK.decode()}",
        name=path.name,
        site=shlex.quote(str(path) + KEPT),
        vtorque=shlex.join(place.hook()),
        kind=kind,
        proof=shlex.quote(str(proof)),
        log=shlex.quote(str(path.with_name(f".vtorque-{kind}."))),  # only root can write there
        retry=RETRY,
        requeue=2,
    ).encode()


def epilogue(place: Installation, path: Path, journal: Path, proof: Path) -> bytes:
    """Return the script ``epilogue`` or ``epilogue.parallel``."""
    return _EPILOGUE.format(
        mark=f"Written by {MARK.decode()}",
        name=path.name,
        site=shlex.quote(str(path) + KEPT),
        journal=shlex.quote(str(journal)),
        proof=shlex.quote(str(proof)),
        vtorque=shlex.join(place.hook()),
    ).encode()
