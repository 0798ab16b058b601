"""Hold resources for a migrated guest on a node outside the job's allocation.

Root submits a placeholder job that holds the guest's resources on that node. Adding the node to the
job's allocation does not work: Slurm gives the node's CPUs to other jobs, and 24.11 drains the node
(both observed). The placeholder is named after the job and the node. vTorque cancels it when the
guest ends or migrates to another node.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

from vtorque_core.api import HostFault, Refused, printable
from vtorque_core.api.batch_system import BatchJob, NodeAdapter
from vtorque_slurm import controller_updates, cpus, hostlist, request_channel
from vtorque_slurm.batch_commands import SlurmClient
from vtorque_slurm.job_records import JobRecord

_WAIT = 60.0  # seconds for the placeholder to run
_FIRST_POLL, _POLL = 0.05, 0.5  # seconds between two queries; mostly the first suffices
_ENDED = ("", "PENDING", "COMPLETING", "COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL",
          "PREEMPTED", "BOOT_FAIL", "DEADLINE", "OUT_OF_MEMORY", "REQUEUED", "REQUEUE_HOLD",
          "SPECIAL_EXIT")  # fmt: skip


def receive(
    adapter: NodeAdapter,
    client: SlurmClient,
    job_id: str,
    nodes: Sequence[str],
    source_node: str,
    node: str,
) -> BatchJob:
    """Reserve this node's resources for a migrating guest, with a placeholder job.

    See :meth:`vtorque_core.api.batch_system.MigrationAdapter.reserve_node`.
    """
    if (here := controller_updates.this_node(client)) != node:
        raise Refused(
            f"a request for {node} reached {here}: correct [plugin.survive] remote_command"
        )
    found = controller_updates.record(client, job_id)
    owner, uid, partition, left_of_time = _fields(client, job_id, "%u|%U|%P|%L", 4)
    held = found if source_node in found.cpus else _placeholder(client, job_id, source_node)
    if held is None:
        raise Refused(f"job {job_id} has no resources on {source_node}")
    if held.granted.get(source_node):
        raise Refused("a job with generic resources (GRES) cannot be migrated")
    account, comment = (_text(client, job_id, field) for field in ("account", "comment"))
    if request_channel.find(comment) is None:
        raise Refused(
            f"job {job_id} was submitted with --vm= of Slurm's own commands, so other nodes do "
            "not know its request: use vsub to submit jobs that may be migrated"
        )
    _hold(client, job_id, held, source_node, node, partition, left_of_time)
    mine = _await(client, job_id, node)
    environ = {
        "SLURM_JOB_ID": job_id,
        "SLURMD_NODENAME": node,
        "SLURM_JOB_USER": owner,
        "SLURM_JOB_UID": uid,
        "SLURM_NODELIST": ",".join(nodes),
        "SLURM_JOB_RESTART_COUNT": str(found.restarts),
        "SLURM_JOB_COMMENT": comment,
        "SLURM_JOB_ACCOUNT": "" if account == "(null)" else account,
        "SLURM_JOB_PARTITION": partition,
    }
    job = adapter.job((), {**client.environ, **environ})
    if job.blob is None or found.name.endswith("+0"):
        raise Refused(f"job {job_id} has nodes without guests, so it cannot be migrated")
    ids = mine.cpus.get(node, ())
    return dataclasses.replace(
        job,
        cpus=cpus.kernel_ids(ids) if client.settings.cpu_ids else (),
        cpu_count=len(ids),
        mem_mib=mine.mib.get(node) or None,
        whole_node=mine.sharing == "NO",
        whole_user=False,
        granted={},
    )


def let_go(client: SlurmClient, job_id: str, node: str) -> None:
    """Cancel the placeholder job on a node. Idempotent."""
    client.run("scancel", "--user=root", f"--name={_name(job_id, node)}")


def has_placeholder(client: SlurmClient, job_id: str, node: str) -> bool:
    """Return whether a placeholder job holds resources on the node for a migrated guest."""
    return bool(_placeholder_id(client, job_id, node))


def remove_node(client: SlurmClient, job_id: str, node: str) -> None:
    """Remove a node from the job's allocation."""
    has = _fields(client, job_id, "%N", 1)[0]
    names = hostlist.expand(has) if has else ()
    if node in names:
        others = ",".join(name for name in names if name != node)
        name = controller_updates.record(client, job_id).name  # the last task has its array's id
        controller_updates.update(client, f"JobId={name}", f"NodeList={others}")


def has_ended(client: SlurmClient, job_id: str, attempt: int) -> bool:
    """Return whether a job's attempt has ended or its Epilog is running."""
    state = _fields(client, job_id, "%T", 1)[0]
    return state in _ENDED or controller_updates.record(client, job_id).restarts > attempt


def _name(job_id: str, node: str) -> str:
    return f"vtorque-{job_id}-{node}"


def _hold(
    client: SlurmClient,
    job_id: str,
    held: JobRecord,
    left: str,
    node: str,
    partition: str,
    left_of_time: str,
) -> None:
    if _placeholder_id(client, job_id, node):
        return
    asked = [f"--cpus-per-task={len(held.cpus[left])}"]
    if held.mib.get(left):
        asked.append(f"--mem={held.mib[left]}M")
    if held.sharing in ("NO", "USER"):
        asked.append("--exclusive")
    client.run(
        "sbatch", "--parsable", f"--job-name={_name(job_id, node)}", f"--nodelist={node}",
        "--nodes=1", "--ntasks=1", *asked, f"--partition={partition}",
        f"--time={left_of_time}", "--no-requeue", "--chdir=/",
        "--output=/dev/null", "--error=/dev/null",
        f"--comment=vTorque: a guest of job {job_id} is on {node}",
        "--wrap=exec sleep infinity",
    )  # fmt: skip


def _await(client: SlurmClient, job_id: str, node: str) -> JobRecord:
    until, pause = time.monotonic() + _WAIT, _FIRST_POLL
    while (found := _placeholder(client, job_id, node)) is None or found.state != "RUNNING":
        if time.monotonic() >= until:
            raise Refused(
                f"{node} has no free resources for the job's guests: the job that would reserve "
                "them is pending"
            )
        time.sleep(pause)
        pause = min(1.5 * pause, _POLL)
    return found


def _placeholder(client: SlurmClient, job_id: str, node: str) -> JobRecord | None:
    number = _placeholder_id(client, job_id, node)
    return controller_updates.record(client, number) if number else None


def _placeholder_id(client: SlurmClient, job_id: str, node: str) -> str:
    name = f"--name={_name(job_id, node)}"
    states = "--states=PD,R,CF,S,ST"
    ids = client.ask("squeue", "--noheader", "--user=root", name, states, "--format=%A")
    return ids.split()[0] if ids.split() else ""


def _text(client: SlurmClient, job_id: str, field: str) -> str:
    """Return one field of a job. The field may contain any user text.

    The query prints only this field, so the text cannot imitate other fields.
    """
    said = client.ask("squeue", "--noheader", f"--jobs={job_id}", f"--Format={field}:2000")
    return said.removesuffix("\n").rstrip()


def _fields(client: SlurmClient, job_id: str, fields: str, count: int) -> list[str]:
    """Return ``count`` fields of a job from squeue; empty fields if Slurm has deleted the job.

    ``fields`` is in the format of squeue, with ``|`` between the fields. It must contain only
    fields that the user cannot change, because a user's text could imitate other fields.
    """
    rows = client.ask(
        "squeue", "--all", "--noheader", "--array", "--states=all", f"--format=%A|{fields}"
    ).split("\n")
    found = next((row.split("|")[1:] for row in rows if row.startswith(f"{job_id}|")), [])
    if found and len(found) != count:
        raise HostFault(
            f"unexpected output of squeue about job {job_id}: {printable('|'.join(found), 200)}"
        )
    return found or [""] * count
