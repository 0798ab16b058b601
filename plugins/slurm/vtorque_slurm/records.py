"""What scontrol prints of a job or a node; the user's texts stand in it as they are.

A job's name may have line ends, so that a user can write whole lines. What is believed must be
there exactly once, in a line that only Slurm's own fields make up.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from vtorque_core.api import HostFault
from vtorque_slurm import hostlist


@dataclass(frozen=True)
class JobRecord:
    """What the controller knows of a job.

    Args:
        name: what scontrol calls this one job, not the whole of its array: ``22`` or ``21_3``.
        state: RUNNING, PENDING, COMPLETING, ...
        restarts: how often it was requeued.
        excluded: nodes where it shall not run, as Slurm writes them; empty: none.
        whole_node: nobody else is on its nodes.
        cpus, mib: CPU ids (Slurm's own) and memory by node; 0 MiB: not limited.
        note: the admin's comment.
    """

    name: str
    state: str
    restarts: int
    excluded: str
    whole_node: bool
    cpus: dict[str, tuple[int, ...]]
    mib: dict[str, int]
    note: str


def parse_job(text: str, job_id: str) -> JobRecord:
    """Return the record of one job in what ``scontrol show job -d`` prints. Raises HostFault.

    Asked for an array's first number scontrol prints all of its elements.
    """
    found = [r for r in _records(text) if re.match(rf"JobId={re.escape(job_id)} ", r)]
    if len(found) != 1:
        raise HostFault(f"scontrol shows {len(found)} records of job {job_id}")
    record = found[0]
    element = re.match(r"JobId=\d+ ArrayJobId=(\d+) ArrayTaskId=(\d+) ", record, re.ASCII)
    excluded = _one(r"   ReqNodeList=\S+ ExcNodeList=(\S+)", record)
    cpus, mib = _shares(record)
    note = re.findall(r"^   AdminComment=(.*)$", record, re.MULTILINE)
    return JobRecord(
        name=f"{element[1]}_{element[2]}" if element else job_id,
        state=_one(r"   JobState=(\w+) Reason=.*", record),
        restarts=int(_one(r"   Requeue=\d Restarts=(\d+) BatchFlag=.*", record)),
        excluded="" if excluded == "(null)" else excluded,
        whole_node=_one(r"   OverSubscribe=(\w+) Contiguous=.*", record) == "NO",
        cpus=cpus,
        mib=mib,
        note=note[0].strip() if len(note) == 1 else "",
    )


def features(text: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return a node's available and active features from ``scontrol show node``."""
    fields = (_one(rf"   {kind}Features=(.*)", text) for kind in ("Available", "Active"))
    available, active = (_names(field) for field in fields)
    return available, active


def node_comment(text: str) -> str:
    """Return a node's comment from ``scontrol show node``; empty: none."""
    found = re.findall(r"^   Comment=(.*)$", text, re.MULTILINE)
    return found[0].strip() if found else ""


def _names(field: str) -> tuple[str, ...]:
    return tuple(name for name in field.strip().split(",") if name and name != "(null)")


def _records(text: str) -> Iterable[str]:
    return re.split(r"\n\s*\n(?=JobId=)", text.strip("\n"))


def _one(line: str, text: str) -> str:
    found = re.findall(rf"^{line}$", text, re.MULTILINE | re.ASCII)
    if len(found) != 1:
        raise HostFault(
            f"scontrol shows {len(found)} lines of this kind (a job's name must not have line ends)"
        )
    return str(found[0])


def _shares(record: str) -> tuple[dict[str, tuple[int, ...]], dict[str, int]]:
    cpus: dict[str, tuple[int, ...]] = {}
    mib: dict[str, int] = {}
    pattern = r"^     Nodes=(\S+) CPU_IDs=([0-9,-]+) Mem=(\d+)\b.*$"
    for nodes, ids, memory in re.findall(pattern, record, re.MULTILINE | re.ASCII):
        try:
            names = hostlist.expand(nodes)
            numbers = tuple(int(n) for n in hostlist.expand(f"[{ids}]"))
        except ValueError as error:
            raise HostFault(f"scontrol show job: {error}") from None
        for name in names:
            if name in cpus:
                raise HostFault(f"scontrol shows two shares of node {name}")
            cpus[name] = numbers
            mib[name] = int(memory)
    return cpus, mib
