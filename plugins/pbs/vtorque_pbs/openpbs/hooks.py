"""The files that the batch systems run as root on the nodes. Pure: text only.

A bare-metal job pays for a shell and a few built-in tests, or on OpenPBS for no module that its
interpreter has not loaded by itself (re and glob take 9 ms); the tests count that.
"""

from __future__ import annotations

import shlex
from pathlib import Path

from vtorque_core.api_setup import KEPT, MARK, Installation
from vtorque_pbs.dialect import VARIABLE

ALARM = 60
"""Seconds for an OpenPBS hook: it ends when the job's start has begun, some 0.5 s after."""
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
if [ -x "$site" ]; then "$site" "$@" || exit $?; fi
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

_BEGIN = """\
# {mark}: starts the guests of VM jobs. Runs as root on each of a job's nodes.
import os
import pbs


def words_of(job, request):
    found = {{"id": job.id, "owner": job.euser or str(job.Job_Owner).split("@")[0]}}
    found.update(request=request, select=job.Resource_List["select"])
    found.update(place=job.Resource_List["place"], vnodes=job.exec_vnode)
    for name, attribute in {attributes!r}.items():
        found[name] = getattr(job, attribute, None)
    return [f"{{name}}={{value}}" for name, value in found.items() if value is not None]


def start(job):
    variables = job.Variable_List or {{}}
    request = variables["{variable}"] if "{variable}" in variables else ""
    if request:
        import subprocess

        null = os.open(os.devnull, os.O_RDWR)
        # It goes on by itself once the job's shell can see that the start is at work.
        return subprocess.call(
            {vtorque!r} + words_of(job, request), stdin=null, stdout=null, stderr=null,
            timeout={wait}, cwd="/", start_new_session=True, env={environ!r},
        )
    return 0


event = pbs.event()
try:
    said = start(event.job)
except Exception as error:  # OpenPBS would start a job that fails here 21 times
    said = repr(error)
if said:
    import syslog

    # Not pbs.logjobmsg: with Python 3.10 and later it raises (PY_SSIZE_T_CLEAN).
    syslog.syslog(f"vtorque {{event.job.id}}: the guests were not started: {{said}}")
event.accept()
"""

_END = """\
# {mark}: releases what VM jobs have. Runs as root on each of a job's nodes.
import os
import pbs


def holds(job_id):
    plain = 0 < len(job_id) <= 50 and job_id[0] not in ".-" and not job_id.strip({plain!r})
    start = job_id + "." if plain else "j"
    for directory in {journal!r}, {proof!r}:
        try:
            if any(name.startswith(start) for name in os.listdir(directory)):
                return True
        except OSError:
            pass
    return False


def release(job_id):
    if holds(job_id):
        import subprocess

        null = os.open(os.devnull, os.O_RDWR)
        return subprocess.call(
            {vtorque!r} + [job_id], stdin=null, stdout=null, stderr=null, timeout={wait}, cwd="/",
            start_new_session=True, env={environ!r},
        )
    return 0


event = pbs.event()
try:
    said = release(str(event.job.id))
except Exception as error:
    said = repr(error)
if said:
    import syslog

    syslog.syslog(f"vtorque {{event.job.id}}: not all is released: {{said}}")
event.accept()
"""
_ATTRIBUTES = {
    "name": "Job_Name", "exec_host": "exec_host2", "run_count": "run_count",
    "interactive": "interactive", "rerunable": "Rerunable",
}  # fmt: skip
_PLAIN = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-"
_ENVIRON = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}


def torque_prologue(place: Installation, path: Path, kind: str) -> bytes:
    """Return ``prologue`` or ``prologue.parallel``; ``kind`` as :class:`TorqueNode` reads it."""
    return _PROLOGUE.format(
        mark=f"Written by {MARK.decode()}",
        name=path.name,
        site=shlex.quote(str(path) + KEPT),
        vtorque=shlex.join(_vtorque(place)),
        kind=kind,
        log=shlex.quote(str(path.with_name(f".vtorque-{kind}."))),  # root's alone can write there
        retry=RETRY,
        requeue=2,
    ).encode()


def torque_epilogue(place: Installation, path: Path, journal: Path, proof: Path) -> bytes:
    """Return ``epilogue`` or ``epilogue.parallel``."""
    return _EPILOGUE.format(
        mark=f"Written by {MARK.decode()}",
        name=path.name,
        site=shlex.quote(str(path) + KEPT),
        journal=shlex.quote(str(journal)),
        proof=shlex.quote(str(proof)),
        vtorque=shlex.join(_vtorque(place)),
    ).encode()


def openpbs_begin(place: Installation) -> bytes:
    """Return the ``execjob_begin`` hook, in Python, for the interpreter of pbs_mom."""
    return _BEGIN.format(
        mark=f"Written by {MARK.decode()}",
        variable=VARIABLE,
        vtorque=[*_vtorque(place), "prologue"],
        attributes=_ATTRIBUTES,
        environ=_ENVIRON,
        wait=ALARM - 10,
    ).encode()


def openpbs_end(place: Installation, journal: Path, proof: Path, seconds: int) -> bytes:
    """Return the ``execjob_end`` hook; ``seconds``: for the whole teardown."""
    return _END.format(
        mark=f"Written by {MARK.decode()}",
        plain=_PLAIN,
        journal=str(journal),
        proof=str(proof),
        vtorque=[*_vtorque(place), "epilogue"],
        environ=_ENVIRON,
        wait=seconds,
    ).encode()


def _vtorque(place: Installation) -> list[str]:
    return [*place.command, "hook", "--config", str(place.config)]
