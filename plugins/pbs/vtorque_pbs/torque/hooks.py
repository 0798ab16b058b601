"""The four scripts that pbs_mom of Torque runs as root on the nodes. Pure: text only.

A bare-metal job pays for a shell and a few built-in tests; the tests count that.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from vtorque_core.api.setup_steps import KEPT, MARK, Installation

FIRST, SISTER = "first", "sister"  # what the hooks put before Torque's arguments
RETRY = 75  # EX_TEMPFAIL (sysexits.h): the hook makes Torque's 2 of it; all other codes end in 0

_PROLOGUE = """\
#!/bin/sh
# {mark}: starts the guests of VM jobs; the site's own {name} runs first.
site={site}
case $5 in
  *other=*vt1:* | *other=*vt1v:*) ;;
  *) [ -x "$site" ] && exec "$site" "$@"; exit 0 ;;
esac
{begin}if [ -x "$site" ]; then "$site" "$@" || exit $?; fi
log={log}$$
{vtorque} prologue {kind} "$@" 2>"$log"
code=$?
# Whatever it ends with, the job starts, and its job shell says why there are no guests: Torque
# would start a job that fails here again and again, or take the node down.
case $code in
  0 | {retry}) [ -s "$log" ] && logger -t vtorque -f "$log" ;;
  *) cat "$log" >&2 ;;
esac
rm -f "$log"
{wake}[ $code -eq {retry} ] && exit {requeue}
exit 0
"""

_BEGIN = """\
read -r begun _ </proc/uptime
"""

_WAKE = """\
# pbs_mom, whose child has run us, waits 5 s ($jobstartblocktime) for the end of all prologues; then
# it looks for it in its rounds alone, of up to 10 s. Any signal ends the poll(2) between two; this
# one means nothing more to it, nor to another process. It looks for 1 s; but it may have been at
# other work, and users' prologues follow: so it is told again until its child is the job.
wake() {
  while read -r key mom; do [ "$key" != PPid: ] || break; done <"/proc/$PPID/status"
  read -r now _ </proc/uptime
  left=$((${begun%.*} + 6 - ${now%.*}))
  for pause in $((left > 0 ? left : 0)) 1 2 4; do
    sleep $pause
    for pid in "$PPID" "$mom"; do
      read -r name <"/proc/$pid/comm" && [ "$name" = pbs_mom ] || return
    done
    kill -CHLD "$mom"
  done
}
wake </dev/null >/dev/null 2>&1 &
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


def prologue(place: Installation, path: Path, kind: str) -> bytes:
    """Return ``prologue`` or ``prologue.parallel``; ``kind`` as :class:`TorqueNode` reads it."""
    return _PROLOGUE.format(
        mark=f"Written by {MARK.decode()}",
        name=path.name,
        site=shlex.quote(str(path) + KEPT),
        vtorque=shlex.join(place.hook()),
        kind=kind,
        log=shlex.quote(str(path.with_name(f".vtorque-{kind}."))),  # root's alone can write there
        retry=RETRY,
        begin=_BEGIN if kind == FIRST else "",
        wake=_WAKE if kind == FIRST else "",
        requeue=2,
    ).encode()


def epilogue(place: Installation, path: Path, journal: Path, proof: Path) -> bytes:
    """Return ``epilogue`` or ``epilogue.parallel``."""
    return _EPILOGUE.format(
        mark=f"Written by {MARK.decode()}",
        name=path.name,
        site=shlex.quote(str(path) + KEPT),
        journal=shlex.quote(str(journal)),
        proof=shlex.quote(str(proof)),
        vtorque=shlex.join(place.hook()),
    ).encode()
