"""Resource requests of a job, merged from command line, environment and script.

The command line overrides the environment, which overrides the script (sbatch(1)).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from vtorque_slurm.options import CommandLine

# Environment variables of options, without the prefix SBATCH_ or SALLOC_: sbatch(1), salloc(1).
_VARIABLES = {
    "account": "ACCOUNT",
    "constraint": "CONSTRAINT",
    "exclusive": "EXCLUSIVE",
    "gpus": "GPUS",
    "gpus-per-node": "GPUS_PER_NODE",
    "gpus-per-socket": "GPUS_PER_SOCKET",
    "gpus-per-task": "GPUS_PER_TASK",
    "gres": "GRES",
    "ignore-pbs": "IGNORE_PBS",
    "job-name": "JOB_NAME",
    "mem": "MEM_PER_NODE",
    "mem-per-cpu": "MEM_PER_CPU",
    "mem-per-gpu": "MEM_PER_GPU",
    "partition": "PARTITION",
    "qos": "QOS",
    "time": "TIMELIMIT",
}
_NOTHING = CommandLine()
_MEMORY = ("mem", "mem-per-cpu", "mem-per-gpu")  # the last one is effective
_UNITS = {"k": 1 / 1024, "m": 1, "g": 1024, "t": 1024**2, "": 1}


@dataclass(frozen=True)
class SlurmRequest:
    """The user's options from all sources, in descending priority."""

    line: CommandLine
    environ: Mapping[str, str]
    script: CommandLine = _NOTHING
    prefix: str = "SBATCH"
    others: frozenset[str] = frozenset()  # options set by #PBS and #BSUB lines

    def last_value(self, name: str) -> str | None:
        """Return an option's effective value, or None if the option is not given."""
        value = self.line.last_value(name)
        variable = f"{self.prefix}_{_VARIABLES[name]}" if name in _VARIABLES else ""
        if value is None and variable:
            value = self.environ.get(variable)
        return self.script.last_value(name) if value is None else value

    def has_option(self, *names: str) -> bool:
        """Return whether command line, environment or script contain any of these options."""
        return any(self.last_value(name) is not None for name in names)

    def number(self, name: str) -> int | None:
        """Return an option's value as a number; None if it is missing or not a number."""
        match = re.fullmatch(r"\d{1,9}", self.last_value(name) or "", re.ASCII)
        return int(match[0]) if match else None


def facts(given: SlurmRequest) -> dict[str, str]:
    """Return the job's partition, account and QOS. Omit an option with several values.

    Accounts are converted to lower case, as in Slurm.
    """
    found = {name: given.last_value(name) or "" for name in ("partition", "account", "qos")}
    found["account"] = found["account"].lower()
    return {name: value for name, value in found.items() if value and "," not in value}


def cpus_per_node(given: SlurmRequest) -> int | None:
    """Return the minimum number of CPUs per node, or None if the request does not determine it.

    Slurm distributes tasks freely over nodes. For several tasks (``-n``), the number is therefore
    known only together with ``-N`` or ``--ntasks-per-node``.
    """
    if not given.has_option("cpus-per-task", "ntasks", "ntasks-per-node", "mincpus"):
        return None
    each = given.number("cpus-per-task") or 1
    most = re.fullmatch(r"(?:\d{1,9}-)?(\d{1,9})", given.last_value("nodes") or "", re.ASCII)
    tasks, per_node = given.number("ntasks"), given.number("ntasks-per-node")
    if per_node is None:
        if tasks is not None and tasks > 1:
            if most is None or int(most[1]) < 1:
                return given.number("mincpus")
            per_node = max(tasks // int(most[1]), 1)
        elif not given.has_option("cpus-per-task", "ntasks"):
            return given.number("mincpus")
        else:
            per_node = 1
    return max(per_node * each, given.number("mincpus") or 0)


def least_nodes(given: SlurmRequest) -> int | None:
    """Return the minimum number of nodes from ``-N``; None if it is not given."""
    least = re.match(r"\d{1,9}(?=[-,]|$)", given.last_value("nodes") or "", re.ASCII)
    return int(least[0]) if least else None


def asks_memory(given: SlurmRequest) -> bool:
    """Return whether the job requests memory in any form."""
    return given.has_option(*_MEMORY) or "mem" in given.others


def mib_per_node(given: SlurmRequest) -> int | None:
    """Return the requested MiB per node; None if unknown or all memory (``--mem=0``)."""
    for place in (given.line, None, given.script):
        view = SlurmRequest(place or _NOTHING, {} if place else given.environ, prefix=given.prefix)
        if view.has_option(*_MEMORY):
            size = mib(view.last_value("mem") or "")
            if size is None and (each := mib(view.last_value("mem-per-cpu") or "")) is not None:
                cpus = cpus_per_node(given)
                size = each * cpus if cpus else None
            return size or None
    return None


def mib(text: str) -> int | None:
    """Convert an sbatch size (default unit M) to MiB, rounded up; None if invalid."""
    match = re.fullmatch(r"(\d{1,12})([kmgt]?)b?", text.lower(), re.ASCII)
    return None if match is None else -int(-(int(match[1]) * _UNITS[match[2]]) // 1)


def seconds(text: str) -> int | None:
    """Convert an sbatch time to seconds (sbatch(1), -t); None if unlimited or invalid."""
    days, dash, rest = text.rpartition("-")
    parts = rest.split(":")
    if len(parts) > 3 or not all(re.fullmatch(r"\d{1,9}", p, re.ASCII) for p in parts):
        return None
    numbers = [int(part) for part in parts]
    if dash:
        if not re.fullmatch(r"\d{1,6}", days, re.ASCII):
            return None
        hours, minutes, secs = (*numbers, 0, 0)[:3]
        return int(days) * 86400 + hours * 3600 + minutes * 60 + secs
    if len(numbers) == 1:
        return numbers[0] * 60
    hours, minutes, secs = (0, *numbers)[-3:]
    return hours * 3600 + minutes * 60 + secs


def show_time(total: int) -> str:
    """Format seconds for sbatch: days-hours:minutes:seconds."""
    minutes, secs = divmod(total, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days}-{hours:02}:{minutes:02}:{secs:02}"
