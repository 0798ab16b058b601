"""Update jobs and nodes in Slurm's controller.

Privileges: root, on the node. All functions raise HostFault if a Slurm command fails.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from vtorque_core.api import HostFault, printable
from vtorque_core.api.batch_system import BareNode, BatchJob
from vtorque_slurm import job_records
from vtorque_slurm.batch_commands import SlurmClient
from vtorque_slurm.job_records import JobRecord
from vtorque_slurm.settings import Settings

OURS = "vTorque"  # prefix of the comments and reasons that vTorque writes
_WAITED = " waited too long for free resources on "
_MAX_NOTE = 300  # characters
_MAX_SHOWN = 2000  # characters that squeue shows; a comment has at most 1024 bytes
_PROLOG_ERROR = "Reason=Prolog error"  # slurmctld's text
# Since 24.11 a node keeps its reason after it is undrained, so this may be an earlier job's reason.
_UNDRAIN = """
for i in $(seq 300); do
  now=$(scontrol show node "$1")
  case $now in
    *" State="*DRAIN*"$2"*) exec scontrol update NodeName="$1" State=UNDRAIN ;;
  esac
  sleep 0.2
done
"""
_STARTED = ("RUNNING", "CONFIGURING")


def record(client: SlurmClient, job_id: str, account: str | None = None) -> JobRecord:
    """Return the controller's record of a job.

    The record includes the QOS only if ``account`` is given: see
    :func:`vtorque_slurm.job_records.parse_job`.
    """
    return job_records.parse_job(show_job(client.ask, job_id), job_id, account)


def show_job(ask: Callable[..., str], job_id: str) -> str:
    """Return the output of ``scontrol show job`` for one job, without the rest of its array.

    ``ask`` is :meth:`SlurmClient.ask`, or :meth:`SlurmClient.run` to avoid retries.
    """
    text = ask("scontrol", "show", "job", "-d", job_id)
    if one := job_records.first_record_id(text, job_id):
        text = ask("scontrol", "show", "job", "-d", one)
    return text


def bare_nodes(client: SlurmClient, job_id: str) -> tuple[BareNode, ...]:
    """Return the nodes of a heterogeneous job, without those of its first component.

    Slurm has allocated these nodes when the first component's Prolog runs (measured).
    """
    text = client.ask("scontrol", "show", "job", "-d", f"{job_id}+0")
    found: list[BareNode] = []
    for number, each in enumerate(job_records.components(text, job_id)[1:], 1):
        text = client.ask("scontrol", "show", "job", "-d", f"{job_id}+{number}")
        found += job_records.bare_nodes(text, each, number)
    return tuple(found)


def host_fault(client: SlurmClient, settings: Settings, job: BatchJob, reason: str) -> None:
    """Requeue the job and exclude this node. Hold the job once the retry limit is reached.

    If several nodes fail at once, the job is requeued once, and all these nodes are excluded. If
    Slurm refuses the requeue (``--no-requeue``, salloc), the job shell prints the reason and the
    job ends.
    """
    note = f"{OURS}: job {job.id} did not start on {job.node}: {reason}"
    found = record(client, job.id)
    _note_node(client, job.node, note)
    waited = _note_of(client, found.name).count(_WAITED)  # starts that were not failures
    held = job.attempt - waited >= settings.requeue_limit
    if found.restarts == job.attempt and found.state in _STARTED:
        client.run("scontrol", "requeuehold" if held else "requeue", _whole_job_id(found))
    excluded = ",".join(filter(None, (found.excluded, job.node)))
    update(client, f"JobId={found.name}", f"ExcNodeList={excluded}")
    if held:
        mend = (
            f"scontrol update JobId={found.name} ExcNodeList=, "
            f"scontrol release {_whole_job_id(found)}"
        )
        note = f"{printable(note, _MAX_NOTE - 150)} (held; when the problem is fixed: {mend})"
    note_job(client, record(client, job.id), note)


def requeue_in_use(client: SlurmClient, job: BatchJob, reason: str) -> None:
    """Requeue the job because a resource is in use by another job.

    The node is not excluded, and the job is never held.
    """
    found = record(client, job.id)
    if found.restarts == job.attempt and found.state in _STARTED:
        client.run("scontrol", "requeue", _whole_job_id(found))
    note_job(client, record(client, job.id), f"{OURS}:{_WAITED}{job.node}: {reason[:100]}")


def _whole_job_id(found: JobRecord) -> str:
    """Return the id to requeue: Slurm requeues a heterogeneous job only as a whole."""
    return found.name.partition("+")[0]


def note_job(client: SlurmClient, found: JobRecord, line: str) -> None:
    """Append a line to the job's AdminComment."""
    text = "; ".join(filter(None, (_note_of(client, found.name), printable(line, _MAX_NOTE))))
    update(client, f"JobId={found.name}", f"AdminComment={text[-1000:]}")


def _note_of(client: SlurmClient, name: str) -> str:
    """Return a job's AdminComment.

    The query prints only this field, so user text cannot imitate it.
    """
    field = f"--Format=admin_comment:{_MAX_SHOWN}"
    said = client.ask("squeue", "--noheader", "--states=all", f"--jobs={name}", field).strip()
    said = said.partition("\n")[0].strip()  # a heterogeneous job's other components follow
    return "" if said == "(null)" else printable(said, _MAX_SHOWN)


def add_to_accounting(client: SlurmClient, job_id: str, line: str) -> bool:
    """Append a line to a job's AdminComment in slurmdbd. Return True if it was already present.

    sacctmgr can modify only text fields of a job, and converts them to lower case (sacctmgr(1),
    SPECIFICATIONS FOR JOB). sacctmgr needs administrator rights in slurmdbd, which root on a node
    has. A task of an array is selected by name (``7_1``), because one of the tasks has the array's
    id, which would select the whole array (measured on 22.05).
    """
    fields = ("--noheader", "--parsable2", "--allocations", "--format=JobIDRaw,JobID,AdminComment")
    rows = [
        row.split("|", 2) for row in client.run("sacct", f"--jobs={job_id}", *fields).split("\n")
    ]
    found = next((row[1:] for row in rows if row[0] == job_id and len(row) == 3), None)
    if found is None:
        raise HostFault(f"sacct does not list job {job_id}")
    name, there = found
    if line.lower() in there.lower():
        return True
    text = "; ".join(filter(None, (there, line)))
    which = ("where", f"JobID={name if '_' in name else job_id}")
    client.run("sacctmgr", "-i", "modify", "job", *which, "set", f"AdminComment={text[-1000:]}")
    return False


def mark(client: SlurmClient, feature: str, healthy: bool, reason: str) -> None:
    """Add the feature to this node if ``healthy``, otherwise remove the feature."""
    if not feature:
        return
    node = this_node(client)
    text = client.ask("scontrol", "show", "node", node)
    available, active = job_records.features(text)
    wanted = [_set_feature(names, feature, healthy) for names in (available, active)]
    if wanted != [available, active]:
        update(
            client,
            f"NodeName={node}",
            f"AvailableFeatures={','.join(wanted[0])}",
            f"ActiveFeatures={','.join(wanted[1])}",
        )
    _note_node(client, node, f"{OURS}: {reason}" if reason else "", text)


def is_marked(client: SlurmClient, feature: str) -> bool:
    """Return True if this node has the feature, or if ``vtorque doctor`` removed the feature.

    Doctor records the removal in the node's comment.
    """
    text = client.ask("scontrol", "show", "node", this_node(client))
    there = job_records.node_comment(text)
    doctors = there.startswith(OURS) and not there.startswith(f"{OURS}: job ")
    return feature in job_records.features(text)[1] or doctors


def drain(client: SlurmClient, reason: str) -> None:
    """Drain this node, unless the site has already drained it."""
    node, nodes = drained_nodes(client)
    there = job_records.is_drained(client.ask("scontrol", "show", "node", node))
    note = printable(f"{OURS}: {reason}", _MAX_NOTE)
    if not there or (node in nodes and f"{OURS}: {nodes[node]}" != note):
        update(client, f"NodeName={node}", "State=DRAIN", f"Reason={note}")


def drained_nodes(client: SlurmClient) -> tuple[str, dict[str, str]]:
    """Return this node's name, and the drain reason of each node that vTorque drained."""
    rows = client.ask("sinfo", "-haN", "--states=drain", "--format=%N|%E").split("\n")
    found = (row.partition(f"|{OURS}: ") for row in rows)
    return this_node(client), {name: reason for name, ours, reason in found if ours}


def undrain(client: SlurmClient) -> None:
    """Undrain this node if vTorque drained it."""
    node, nodes = drained_nodes(client)
    if node in nodes:
        update(client, f"NodeName={node}", "State=UNDRAIN")


def undrain_after_prolog(client: SlurmClient, node: str) -> None:
    """Start a background process that undrains this node after Prolog has failed for one job.

    The process waits until Slurm drains the node, after the end of Prolog. A node that was already
    drained for another reason stays drained.
    """
    text = client.ask("scontrol", "show", "node", node)
    if not job_records.is_drained(text) or _PROLOG_ERROR in text:
        client.start_detached(_UNDRAIN, node, _PROLOG_ERROR)


def requeue(client: SlurmClient, job_id: str) -> None:
    """Requeue a running job, with all components if it is heterogeneous.

    The state is checked first, because Slurm would also requeue a finished job.
    """
    found = record(client, job_id)
    if found.state not in _STARTED:
        raise HostFault(f"job {job_id} no longer runs: {found.state}")
    client.run("scontrol", "requeue", _whole_job_id(found))


def this_node(client: SlurmClient) -> str:
    """Return this node's name in Slurm, from SLURMD_NODENAME or otherwise from scontrol."""
    name = client.environ.get("SLURMD_NODENAME")
    if name:
        return name
    host = os.uname().nodename.split(".")[0]
    found = client.ask("scontrol", "show", "aliases", host).split() if host else []
    return found[0] if found else host


def update(client: SlurmClient, *fields: str) -> None:
    """Run ``scontrol update`` with these fields."""
    client.run("scontrol", "update", *fields)


def _set_feature(names: tuple[str, ...], feature: str, there: bool) -> tuple[str, ...]:
    others = tuple(name for name in names if name != feature)
    if not there:
        return others
    return names if feature in names else (*names, feature)


def _note_node(client: SlurmClient, node: str, note: str, shown: str | None = None) -> None:
    """Set or clear the node's comment. A comment written by the site is kept."""
    text = client.ask("scontrol", "show", "node", node) if shown is None else shown
    there = job_records.node_comment(text)
    wanted = printable(note, _MAX_NOTE)
    if (not there or there.startswith(OURS)) and there != wanted:
        update(client, f"NodeName={node}", f"Comment={wanted}")
