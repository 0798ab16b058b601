"""Generate the hooks that OpenPBS runs as root: two in pbs_mom on the nodes, one in pbs_server.

For bare-metal jobs, they import only modules that the interpreter has already loaded (re and glob
would take 9 ms).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from vtorque_admin.steps import MARK
from vtorque_core.api.setup_steps import Installation
from vtorque_pbs.qsub_dialect import VARIABLE

ALARM = 60
"""Limit in seconds for a hook. ``execjob_begin`` needs about 0.5 s to begin the guests' start."""

ORDER = 200
"""Order of the hooks: after pbs_cgroups (100 in pbs_cgroups.HK), which records the job's GPUs."""

_BEGIN = """\
# {mark}: starts the guests of VM jobs. Runs as root on each of a job's nodes.
import os
import pbs


def words_of(job, request):
    found = {{"id": job.id, "owner": job.euser or str(job.Job_Owner).split("@")[0]}}
    # pbs_mom has no Resource_List.select, but the same with the queue's and the server's defaults.
    found.update(request=request, select=job.schedselect)
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
        # The prologue returns to the hook once the job shell can see that the start is in progress.
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

    syslog.syslog(f"vtorque {{event.job.id}}: not all resources were released: {{said}}")
event.accept()
"""
_QUEUE = """\
# {mark}: makes plain jobs of some queues VM jobs. Runs as root on the server's host.
import pbs

FOUND = {found!r}
FEATURE = {feature!r}
OLD = "nodes", "host", "vnode"


def found(job):
    # A queue, or a resource that the job requests as True.
    name = job.queue.name if job.queue else str(pbs.server().default_queue or "")
    if name in FOUND:
        return FOUND[name]
    if FEATURE in FOUND:
        asked = job.Resource_List
        if FEATURE + "=true" in str(asked["select"]).lower() or str(asked[FEATURE]) == "True":
            return FOUND[FEATURE]
    return None


def chunk(text, cpus, mib):
    words = text.split(":")
    given = [word.partition("=")[0] for word in words]
    if FEATURE and FEATURE in given and FEATURE + "=true" not in text.lower():
        return text  # a part of a mixed request, without guests
    more = {{"ncpus": cpus, "mem": "%dmb" % mib if mib else "", FEATURE: "True" if FEATURE else ""}}
    return ":".join(words + ["%s=%s" % (k, v) for k, v in more.items() if v and k not in given])


def change(job, vm):
    if job.executable:
        raise ValueError("qsub -- COMMAND is not possible here: submit a script, or use vsub")
    asked = job.Resource_List
    if asked["select"] is None and any(asked[name] is not None for name in OLD):
        raise ValueError("write -l select= for %s=, or use vsub" % "=, ".join(OLD))
    old = asked["select"] is None and (asked["ncpus"] is not None or asked["mem"] is not None)
    if old:
        if asked["ncpus"] is None:
            asked["ncpus"] = vm["cpus"]
        if asked["mem"] is None and vm["mib"]:
            asked["mem"] = pbs.size("%dmb" % vm["mib"])
        if FEATURE:
            asked[FEATURE] = True
    else:
        chunks = str(asked["select"] or "1").split("+")
        asked["select"] = pbs.select("+".join(chunk(c, vm["cpus"], vm["mib"]) for c in chunks))
    if vm["seconds"] and asked["walltime"] is not None:
        asked["walltime"] = pbs.duration(int(asked["walltime"]) + vm["seconds"])
    import base64
    import json

    shell = str(job.Shell_Path_List or "").split(",")[0].partition("@")[0].strip()
    request = dict(json.loads(vm["request"]), shell=shell or None)
    blob = bytes([0]) + json.dumps(request).encode()
    token = base64.urlsafe_b64encode(blob).decode().rstrip("=")
    job.Variable_List["{variable}"] = "vt1:" + token


event = pbs.event()
vm = found(event.job)
if vm is not None and str(event.job.Shell_Path_List) != {jobshell!r}:  # vsub names the job shell
    try:
        change(event.job, vm)
        event.job.Shell_Path_List = pbs.path_list({jobshell!r})
    except Exception as error:
        event.reject("vtorque: the jobs of this queue run in virtual machines: %s" % error)
event.accept()
"""
_ATTRIBUTES = {
    "name": "Job_Name", "exec_host": "exec_host2", "run_count": "run_count",
    "interactive": "interactive", "rerunable": "Rerunable",
    "queue": "queue", "account": "Account_Name",
}  # fmt: skip
_PLAIN = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-"
_ENVIRON = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}


def begin(place: Installation) -> bytes:
    """Return the ``execjob_begin`` hook, Python code for pbs_mom's interpreter."""
    return _BEGIN.format(
        mark=f"Written by {MARK.decode()}",
        variable=VARIABLE,
        vtorque=[*place.hook("prologue")],
        attributes=_ATTRIBUTES,
        environ=_ENVIRON,
        wait=ALARM - 10,
    ).encode()


def end(place: Installation, journal: Path, proof: Path, seconds: int) -> bytes:
    """Return the ``execjob_end`` hook; ``seconds`` limits the whole teardown."""
    return _END.format(
        mark=f"Written by {MARK.decode()}",
        plain=_PLAIN,
        journal=str(journal),
        proof=str(proof),
        vtorque=[*place.hook("epilogue")],
        environ=_ENVIRON,
        wait=seconds,
    ).encode()


def queue(found: Mapping[str, Mapping[str, object]], feature: str, jobshell: Path) -> bytes:
    """Return the ``queuejob`` hook.

    Args:
        found: For each queue or resource in ``vm_queues``, ``request`` (JSON text), and ``cpus``,
            ``mib`` and ``seconds`` as in :class:`vtorque_core.api.batch_system.Needs`.
        feature: Boolean resource of nodes that run VM jobs, or "".
        jobshell: The shell of VM jobs.
    """
    return _QUEUE.format(
        mark=f"Written by {MARK.decode()}",
        found={name: dict(each) for name, each in found.items()},
        feature=feature,
        variable=VARIABLE,
        jobshell=str(jobshell),
    ).encode()
