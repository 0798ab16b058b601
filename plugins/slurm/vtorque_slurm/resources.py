"""What a job asks of Slurm, merged from command line, environment and script; sizes and times.

The command line wins over the environment, which wins over the script: sbatch(1).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from vtorque_slurm.options import CommandLine

# Variables of the options that we look at; the prefix is SBATCH or SALLOC: sbatch(1), salloc(1).
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
_MEMORY = ("mem", "mem-per-cpu", "mem-per-gpu")  # each replaces the others
_UNITS = {"k": 1 / 1024, "m": 1, "g": 1024, "t": 1024**2, "": 1}


@dataclass(frozen=True)
class Given:
    """All that the user has given, by place, the strongest first."""

    line: CommandLine
    environ: Mapping[str, str]
    script: CommandLine = _NOTHING
    prefix: str = "SBATCH"
    others: frozenset[str] = frozenset()  # what the lines of PBS or LSF in the script set

    def last(self, name: str) -> str | None:
        """Return the value that counts; None: not given."""
        value = self.line.last(name)
        variable = f"{self.prefix}_{_VARIABLES[name]}" if name in _VARIABLES else ""
        if value is None and variable:
            value = self.environ.get(variable)
        return self.script.last(name) if value is None else value

    def has(self, *names: str) -> bool:
        """Return whether one of the options is given anywhere."""
        return any(self.last(name) is not None for name in names)

    def number(self, name: str) -> int | None:
        """Return an option's number; None where it has none."""
        match = re.fullmatch(r"\d{1,9}", self.last(name) or "", re.ASCII)
        return int(match[0]) if match else None


def facts(given: Given) -> dict[str, str]:
    """Return what the job's partition, account and qos are, as far as the user says one.

    Slurm has accounts in lower case, and chooses among several partitions.
    """
    found = {name: given.last(name) or "" for name in ("partition", "account", "qos")}
    found["account"] = found["account"].lower()
    return {name: value for name, value in found.items() if value and "," not in value}


def cpus_per_node(given: Given) -> int | None:
    """Return the CPUs that the job asks for on each node, at least; None if that is open.

    Without ``-N`` Slurm spreads ``-n`` tasks as it likes, so only ``-n 1`` says something.
    """
    if not given.has("cpus-per-task", "ntasks", "ntasks-per-node", "mincpus"):
        return None
    each = given.number("cpus-per-task") or 1
    most = re.fullmatch(r"(?:\d{1,9}-)?(\d{1,9})", given.last("nodes") or "", re.ASCII)
    tasks, per_node = given.number("ntasks"), given.number("ntasks-per-node")
    if per_node is None:
        if tasks is not None and tasks > 1:
            if most is None or int(most[1]) < 1:
                return given.number("mincpus")
            per_node = max(tasks // int(most[1]), 1)
        elif not given.has("cpus-per-task", "ntasks"):
            return given.number("mincpus")
        else:
            per_node = 1
    return max(per_node * each, given.number("mincpus") or 0)


def least_nodes(given: Given) -> int | None:
    """Return how many nodes ``-N`` asks for at least; None if it does not."""
    least = re.match(r"\d{1,9}(?=[-,]|$)", given.last("nodes") or "", re.ASCII)
    return int(least[0]) if least else None


def asks_memory(given: Given) -> bool:
    """Return whether the job asks for memory in some way."""
    return given.has(*_MEMORY) or "mem" in given.others


def mib_per_node(given: Given) -> int | None:
    """Return the memory in MiB that the job asks for on each node; None if that is open.

    ``--mem=0`` is all of a node's.
    """
    for place in (given.line, None, given.script):
        view = Given(place or _NOTHING, {} if place else given.environ, prefix=given.prefix)
        if view.has(*_MEMORY):
            size = mib(view.last("mem") or "")
            if size is None and (each := mib(view.last("mem-per-cpu") or "")) is not None:
                cpus = cpus_per_node(given)
                size = each * cpus if cpus else None
            return size or None
    return None


def mib(text: str) -> int | None:
    """Return a size of sbatch in MiB, rounded up; None if it is none. The unit is M."""
    match = re.fullmatch(r"(\d{1,12})([kmgt]?)b?", text.lower(), re.ASCII)
    return None if match is None else -int(-(int(match[1]) * _UNITS[match[2]]) // 1)


def seconds(text: str) -> int | None:
    """Return a time of sbatch in seconds; None: unlimited, or no time. Source: sbatch(1), -t."""
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
    """Return seconds as sbatch reads them: days-hours:minutes:seconds."""
    minutes, secs = divmod(total, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days}-{hours:02}:{minutes:02}:{secs:02}"
