"""Parse scontrol's output about jobs and nodes, which contains unquoted user text.

A job name may contain line ends, so users can forge lines and records. A line is trusted only if it
consists of Slurm's own fields and is unique in the output. These functions raise Refused for forged
output and HostFault for missing fields.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from vtorque_core.api import HostFault, Refused, name_errors, printable
from vtorque_core.api.batch_system import BareNode, Grant
from vtorque_slurm import gres, hostlist

_MOST_CPUS = 1 << 19  # in all lines of a job; nodes with the same CPUs share a line
FORGED = (
    "the job's name or comment contains lines that look like output of scontrol: choose "
    "another name or comment"
)


@dataclass(frozen=True)
class JobRecord:
    """The controller's record of one job.

    Attributes:
        name: Id of this job alone, not of its array or heterogeneous job: ``22``, ``21_3`` or
            ``22+0``.
        restarts: Number of requeues.
        excluded: Nodes in Slurm's notation.
        sharing: Which jobs may share the nodes: NO (none), USER (of the same user), OK, YES, ...
        cpus: Slurm's CPU ids by node.
        mib: Memory by node; 0 means unlimited.
        granted: Generic resources by node; see :func:`vtorque_slurm.gres.parse_granted`.
        qos: Empty if the job has no QOS or ``account`` was not given to :func:`parse_job`.
        limit: Time limit as a PBS walltime; empty if unknown or unlimited.
    """

    name: str
    state: str
    restarts: int
    excluded: str
    sharing: str
    cpus: dict[str, tuple[int, ...]]
    mib: dict[str, int]
    granted: dict[str, Mapping[str, Grant]]
    qos: str = ""
    limit: str = ""


def parse_job(text: str, job_id: str, account: str | None = None) -> JobRecord:
    """Parse the output of ``scontrol show job -d`` for one job.

    ``account`` is the job's account from slurmd, "" if the job has none. Without the account
    (None), the result's ``qos`` is empty; see :func:`_qos`.
    """
    found = _records(text)
    if not found[0].startswith(f"JobId={job_id} "):
        raise HostFault(f"scontrol show job does not list job {job_id}")
    if len(found) > 1:
        raise Refused(FORGED)
    record = found[0]
    element = re.match(r"JobId=\d+ ArrayJobId=(\d+) ArrayTaskId=(\d+) ", record, re.ASCII)
    name = f"{element[1]}_{element[2]}" if element else job_id
    excluded = _find_line(r"   ReqNodeList=\S+ ExcNodeList=(\S+)", record)
    cpus, mib, granted = _shares(record)
    return JobRecord(
        name=f"{job_id}+0" if _is_leader(record, job_id) else name,
        state=_find_line(r"   JobState=(\w+) Reason=.*", record),
        restarts=int(_find_line(r"   Requeue=\d Restarts=(\d+) BatchFlag=.*", record)),
        excluded="" if excluded == "(null)" else excluded,
        sharing=_find_line(r"   OverSubscribe=(\w+) Contiguous=.*", record),
        cpus=cpus,
        mib=mib,
        granted=granted,
        qos="" if account is None else _qos(record, account),
        limit=_limit(record),
    )


def launch_failure(text: str, job_id: str) -> str:
    """Return why Slurm could not start a job's script.

    The result is empty if Slurm has started the script, or if the reason is unknown.
    """
    found = _records(text)
    if not found[0].startswith(f"JobId={job_id} ") or len(found) > 1:
        return ""
    if _find_line(r"   JobState=\w+ Reason=(\w+) .*", found[0]) != "JobLaunchFailure":
        return ""
    files = dict.fromkeys(_find_line(rf"   Std{each}=(.*)", found[0]) for each in ("Out", "Err"))
    return (
        "Slurm could not start the script (JobLaunchFailure). Check that the directories of "
        f"{' and '.join(printable(file, 300) for file in files)} exist and that you may write "
        "to them"
    )


def _limit(record: str) -> str:
    """Return a job's time limit; empty if several lines contain a limit, as in a forged record."""
    found = re.findall(r"^   RunTime=\S+ TimeLimit=([0-9:-]+) .*$", record, re.MULTILINE | re.ASCII)
    return str(found[0]).replace("-", ":") if len(found) == 1 else ""


def _qos(record: str, account: str) -> str:
    """Return the job's QOS, from the line that contains the job's ``account`` and the QOS.

    Without slurmdbd, users can choose any text as account, even one with ``QOS=``. Because the
    account is known, no part of its text is taken for the QOS.
    """
    of = re.escape(account or "(null)")
    qos = _find_line(rf"   Priority=\d+ Nice=-?\d+ Account={of} QOS=(\S+)(?: WCKey=.*)?", record)
    return "" if qos in ("(null)", "N/A") else qos


def components(text: str, job_id: str) -> tuple[str, ...]:
    """Return the ids of a heterogeneous job's components from ``scontrol show job ID+0``."""
    ids = _find_line(r"   HetJobIdSet=([0-9,-]+)", text)
    found = hostlist.expand(f"[{ids}]")
    if not _is_leader(text, job_id) or found[0] != job_id:
        raise HostFault(f"scontrol show job does not list the heterogeneous job {job_id}")
    return found


def bare_nodes(text: str, job_id: str, number: int) -> list[BareNode]:
    """Return a component's nodes, each with the number of tasks that fit on its CPUs.

    ``text`` is the output of ``scontrol show job -d ID+N``, where N is ``number``.
    """
    if not text.startswith(f"JobId={job_id} HetJobId=") or len(_records(text)) > 1:
        raise HostFault(f"scontrol show job does not list the component {job_id}")
    each = _find_line(r"   NumNodes=\S+ NumCPUs=\d+ NumTasks=\S+ CPUs/Task=(\S+) ReqB.*", text)
    per_task = int(each) if each.isdecimal() else 1
    cpus, *_ = _shares(text)
    return [
        BareNode(name, max(1, len(cpus.get(name, ())) // per_task), part=number)
        for name in hostlist.expand(_find_line(r"   NodeList=(\S+)", text))
    ]


def _is_leader(text: str, job_id: str) -> bool:
    return text.startswith(f"JobId={job_id} HetJobId={job_id} HetJobOffset=0 ")


def first_record_id(text: str, job_id: str) -> str:
    """Return the id of the first record if ``text`` has several, otherwise an empty string.

    ``scontrol show job`` prints one record for each task of an array or component of a
    heterogeneous job. A user can forge lines of the text. This is harmless, because the returned id
    always begins with ``job_id``.
    """
    if _is_leader(text, job_id):
        return f"{job_id}+0"
    number = re.escape(job_id)
    pattern = rf"^JobId={number} ArrayJobId={number} ArrayTaskId=(\d+) "
    found = re.search(pattern, text, re.MULTILINE | re.ASCII) if len(_records(text)) > 1 else None
    return f"{job_id}_{found[1]}" if found else ""


def features(text: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return a node's available features and active features from ``scontrol show node``."""
    fields = (_find_line(rf"   {kind}Features=(.*)", text) for kind in ("Available", "Active"))
    available, active = (_names(field) for field in fields)
    return available, active


def node_comment(text: str) -> str:
    """Return a node's comment from ``scontrol show node``, or an empty string."""
    found = re.findall(r"^   Comment=(.*)$", text, re.MULTILINE)
    return found[0].strip() if found else ""


def is_drained(text: str) -> bool:
    """Return whether ``scontrol show node`` reports a state with DRAIN."""
    return "DRAIN" in _find_line(r"   State=(\S+) .*", text).split("+")


def offered_mib(text: str) -> int:
    """Return the memory for jobs from ``scontrol show node``: RealMemory minus MemSpecLimit."""
    kept = re.search(r"^   (?:C\w+=\S* +)*MemSpecLimit=(\d+)", text, re.MULTILINE | re.ASCII)
    return int(_find_line(r"   RealMemory=(\d+) .*", text)) - int(kept[1] if kept else 0)


def _names(field: str) -> tuple[str, ...]:
    return tuple(name for name in field.strip().split(",") if name and name != "(null)")


def _records(text: str) -> list[str]:
    return re.split(r"\n\s*\n(?=JobId=)", text.strip("\n"))


def _find_line(line: str, text: str) -> str:
    found = re.findall(rf"^{line}$", text, re.MULTILINE | re.ASCII)
    if len(found) > 1:
        raise Refused(FORGED)
    if not found:
        raise HostFault(f"the output of scontrol has no line like {line.strip()}")
    return str(found[0])


def _shares(
    record: str,
) -> tuple[dict[str, tuple[int, ...]], dict[str, int], dict[str, Mapping[str, Grant]]]:
    cpus: dict[str, tuple[int, ...]] = {}
    mib: dict[str, int] = {}
    granted: dict[str, Mapping[str, Grant]] = {}
    left = _MOST_CPUS
    pattern = r"^     Nodes=(\S+) CPU_IDs=([0-9,-]+) Mem=(\d+)\b(?: GRES=(\S*))?.*$"
    for nodes, ids, memory, others in re.findall(pattern, record, re.MULTILINE | re.ASCII):
        with name_errors("scontrol show job", ValueError):
            names = hostlist.expand(nodes)
            numbers = hostlist.numbers(ids, left)
            if len(cpus) + len(names) > hostlist.MAX_HOSTS:
                raise ValueError(f"the job has more than {hostlist.MAX_HOSTS} nodes")
        left -= len(numbers)
        for name in names:
            if name in cpus:
                raise Refused(FORGED)
            cpus[name] = numbers
            mib[name] = int(memory)
            granted[name] = gres.parse_granted(others)
    return cpus, mib, granted
