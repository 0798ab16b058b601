"""What scontrol prints of a job or a node; the user's texts stand in it as they are.

A job's name may have line ends, so that a user can write whole lines, and records. What is
believed must be there exactly once, in a line that only Slurm's own fields make up, in all that is
printed. What is there more than once is the user's doing: the job is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from vtorque_core.api import HostFault, Refused, printable
from vtorque_core.api.batch_system import BareNode, Grant
from vtorque_slurm import gres, hostlist

_MOST_CPUS = 1 << 19  # in all lines of a job; Slurm has one for nodes with the same CPUs
FORGED = "the job's name or comment has line ends that look like Slurm's own: choose another"


@dataclass(frozen=True)
class JobRecord:
    """What the controller knows of a job.

    Args:
        name: what scontrol calls this one job, not the whole of its array or heterogeneous job:
            ``22``, ``21_3`` or ``22+0``.
        state: RUNNING, PENDING, COMPLETING, ...
        restarts: how often it was requeued.
        excluded: nodes where it shall not run, as Slurm writes them; empty: none.
        sharing: who else may be on its nodes: NO (nobody), USER (jobs of its user), OK, YES, ...
        cpus, mib: CPU ids (Slurm's own) and memory by node; 0 MiB: not limited.
        granted: generic resources by node: :func:`vtorque_slurm.gres.granted`.
        qos: empty: it has none, or nobody has asked.
        limit: how long it may run, as PBS writes a walltime; empty: that is not known, or for ever.
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
    """Return the record of one job in what ``scontrol show job -d`` prints of it alone.

    ``account``: the job's, as slurmd says it, "" without one; None: its qos is not wanted.
    Raises HostFault, and Refused where a text of the user's looks like Slurm's own.
    """
    found = _records(text)
    if not found[0].startswith(f"JobId={job_id} "):
        raise HostFault(f"scontrol shows no job {job_id}")
    if len(found) > 1:
        raise Refused(FORGED)
    record = found[0]
    element = re.match(r"JobId=\d+ ArrayJobId=(\d+) ArrayTaskId=(\d+) ", record, re.ASCII)
    name = f"{element[1]}_{element[2]}" if element else job_id
    excluded = _one(r"   ReqNodeList=\S+ ExcNodeList=(\S+)", record)
    cpus, mib, granted = _shares(record)
    return JobRecord(
        name=f"{job_id}+0" if _leads(record, job_id) else name,
        state=_one(r"   JobState=(\w+) Reason=.*", record),
        restarts=int(_one(r"   Requeue=\d Restarts=(\d+) BatchFlag=.*", record)),
        excluded="" if excluded == "(null)" else excluded,
        sharing=_one(r"   OverSubscribe=(\w+) Contiguous=.*", record),
        cpus=cpus,
        mib=mib,
        granted=granted,
        qos="" if account is None else _qos(record, account),
        limit=_limit(record),
    )


def launch_failure(text: str, job_id: str) -> str:
    """Return why Slurm did not start a job's script, in one line; empty: it did, or is not known.

    ``text``: what ``scontrol show job -d`` prints of it alone. Raises HostFault, Refused.
    """
    found = _records(text)
    if not found[0].startswith(f"JobId={job_id} ") or len(found) > 1:
        return ""
    if _one(r"   JobState=\w+ Reason=(\w+) .*", found[0]) != "JobLaunchFailure":
        return ""
    files = dict.fromkeys(_one(rf"   Std{each}=(.*)", found[0]) for each in ("Out", "Err"))
    return (
        "Slurm could not start the script (JobLaunchFailure): see whether the directories of "
        f"{' and '.join(printable(file, 300) for file in files)} exist and are yours to write"
    )


def _limit(record: str) -> str:
    """Return a job's time limit; only its own user could have written another one."""
    found = re.findall(r"^   RunTime=\S+ TimeLimit=([0-9:-]+) .*$", record, re.MULTILINE | re.ASCII)
    return str(found[0]).replace("-", ":") if len(found) == 1 else ""


def _qos(record: str, account: str) -> str:
    """Return a job's qos. What is before it in its line can be any text, but a known one.

    Without slurmdbd Slurm takes any account.
    """
    of = re.escape(account or "(null)")
    qos = _one(rf"   Priority=\d+ Nice=-?\d+ Account={of} QOS=(\S+)(?: WCKey=.*)?", record)
    return "" if qos in ("(null)", "N/A") else qos


def components(text: str, job_id: str) -> tuple[str, ...]:
    """Return the ids of a heterogeneous job's components, from ``scontrol show job ID+0``.

    Raises HostFault, Refused.
    """
    ids = _one(r"   HetJobIdSet=([0-9,-]+)", text)
    found = hostlist.expand(f"[{ids}]")
    if not _leads(text, job_id) or found[0] != job_id:
        raise HostFault(f"scontrol shows no heterogeneous job {job_id}")
    return found


def bare_nodes(text: str, job_id: str, number: int) -> list[BareNode]:
    """Return the nodes of the component of this number and how many tasks each has CPUs for.

    ``text``: what ``scontrol show job -d ID+N`` prints. Raises HostFault, Refused.
    """
    if not text.startswith(f"JobId={job_id} HetJobId=") or len(_records(text)) > 1:
        raise HostFault(f"scontrol shows no component {job_id}")
    each = _one(r"   NumNodes=\S+ NumCPUs=\d+ NumTasks=\S+ CPUs/Task=(\S+) ReqB.*", text)
    per_task = int(each) if each.isdecimal() else 1
    cpus, *_ = _shares(text)
    return [
        BareNode(name, max(1, len(cpus.get(name, ())) // per_task), part=number)
        for name in hostlist.expand(_one(r"   NodeList=(\S+)", text))
    ]


def _leads(text: str, job_id: str) -> bool:
    """Return whether it is a heterogeneous job's first component: no text of a user's precedes."""
    return text.startswith(f"JobId={job_id} HetJobId={job_id} HetJobOffset=0 ")


def one_of(text: str, job_id: str) -> str:
    """Return what to ask for where a number shows all of a job, not one part; empty: nothing.

    That is an array's first element and a heterogeneous job's first component. A user can write
    such a line of an array: the controller then shows no job, or this very one.
    """
    if _leads(text, job_id):
        return f"{job_id}+0"
    number = re.escape(job_id)
    pattern = rf"^JobId={number} ArrayJobId={number} ArrayTaskId=(\d+) "
    found = re.search(pattern, text, re.MULTILINE | re.ASCII) if len(_records(text)) > 1 else None
    return f"{job_id}_{found[1]}" if found else ""


def features(text: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return a node's available and active features from ``scontrol show node``."""
    fields = (_one(rf"   {kind}Features=(.*)", text) for kind in ("Available", "Active"))
    available, active = (_names(field) for field in fields)
    return available, active


def node_comment(text: str) -> str:
    """Return a node's comment from ``scontrol show node``; empty: none."""
    found = re.findall(r"^   Comment=(.*)$", text, re.MULTILINE)
    return found[0].strip() if found else ""


def is_drained(text: str) -> bool:
    """Return whether a node gets no new jobs, by ``scontrol show node``: ``State=IDLE+DRAIN``."""
    return "DRAIN" in _one(r"   State=(\S+) .*", text).split("+")


def offered_mib(text: str) -> int:
    """Return what a node has for jobs: RealMemory less MemSpecLimit. Raises HostFault.

    ``text``: what ``scontrol show node`` prints.
    """
    kept = re.search(r"^   (?:C\w+=\S* +)*MemSpecLimit=(\d+)", text, re.MULTILINE | re.ASCII)
    return int(_one(r"   RealMemory=(\d+) .*", text)) - int(kept[1] if kept else 0)


def _names(field: str) -> tuple[str, ...]:
    return tuple(name for name in field.strip().split(",") if name and name != "(null)")


def _records(text: str) -> list[str]:
    return re.split(r"\n\s*\n(?=JobId=)", text.strip("\n"))


def _one(line: str, text: str) -> str:
    found = re.findall(rf"^{line}$", text, re.MULTILINE | re.ASCII)
    if len(found) > 1:
        raise Refused(FORGED)
    if not found:
        raise HostFault(f"scontrol shows no line like {line.strip()}")
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
        try:
            names = hostlist.expand(nodes)
            numbers = hostlist.numbers(ids, left)
            if len(cpus) + len(names) > hostlist.MAX_HOSTS:
                raise ValueError(f"more than {hostlist.MAX_HOSTS} nodes")
        except ValueError as error:
            raise HostFault(f"scontrol show job: {error}") from None
        left -= len(numbers)
        for name in names:
            if name in cpus:
                raise Refused(FORGED)
            cpus[name] = numbers
            mib[name] = int(memory)
            granted[name] = gres.granted(others)
    return cpus, mib, granted
