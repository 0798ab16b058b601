"""Generic resources (GRES) and licenses: requests of a job and allocations on a node. No I/O.

GRES have the names of Slurm's TRES: ``gres/gpu`` for any type, or ``gres/gpu:a100``. Licenses are
named as in ``--licenses``. SLURM_JOB_GPUS of Prolog is not used because it lists only GPUs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from vtorque_core.api import HostFault, UsageError, name_errors
from vtorque_core.api.batch_system import Grant, Needs
from vtorque_slurm import hostlist
from vtorque_slurm.resources import SlurmRequest

_UNITS = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3, "t": 1024**4, "p": 1024**5}
_COUNT = re.compile(r"([0-9]{1,15})([kmgtp]?)", re.ASCII | re.IGNORECASE)  # sbatch(1), --gres
_OF_GPUS = ("gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket")
_NAME = r"[^\s:,()]+"
# As written by src/slurmctld/gres_ctld.c: gpu:a100:2(IDX:0-1), gpu:1(IDX:0,3), bandwidth(CNT:10)
_MOST_DEVICES = 256  # of a node; users can forge lines of scontrol's output
_GRANT = rf"({_NAME})(?::({_NAME}))??(?::([0-9]{{1,18}})\(IDX:([0-9,-]*)\)|\(CNT:([0-9]{{1,18}})\))"
_SHARED = ("mps", "shard")  # gres.conf(5): jobs share these devices


def requested_gres(given: SlurmRequest) -> dict[str, int]:
    """Return the requested GRES per node and the requested licenses, by name.

    For ``--gpus``, the number per node is only an average, because Slurm may distribute GPUs
    unevenly. The prologue checks the actual allocation.
    """
    found: dict[str, int] = {}

    def add(name: str, kind: str, count: int) -> None:
        for each in dict.fromkeys((f"gres/{name}", f"gres/{name}:{kind}" if kind else "")):
            if each:
                found[each] = found.get(each, 0) + count

    for item in _items(given.last_value("gres")):
        name, kind, count = _parts(re.sub(r"^gres[:/]", "", item))
        if name != "none":
            add(name, kind, count)
    nodes = given.number("nodes") or 1
    for option in _OF_GPUS:
        for item in _items(given.last_value(option)):
            _, kind, count = _parts(f"gpu:{item}")
            add("gpu", kind, count // nodes if option == "gpus" else count)
    for item in _items(given.last_value("licenses")):
        name, _, count = _parts(item)
        found[name] = found.get(name, 0) + count
    return found


def additions(given: SlurmRequest, needs: Needs) -> list[str]:
    """Return ``--gres`` and ``--licenses`` for the needs that the user has not requested.

    The options repeat the user's items, because sbatch uses only the last ``--gres`` and
    ``--licenses``.

    Raises:
        UsageError: A needed resource is not a GRES, or the user requested a GRES without its type.
    """
    there = requested_gres(given)
    gres: list[str] = []
    for name, count in needs.resources.items():
        word = name.removeprefix("gres/")
        if word == name:
            raise UsageError(
                f"{name} is not a resource of Slurm's nodes: its name must begin with gres/"
            )
        if name not in there and (base := f"gres/{word.partition(':')[0]}") in there:
            raise UsageError(f"{base} is requested without its type: request {word}:{count}")
        gres += [f"{word}:{count}"] if name not in there else []
    licenses = [f"{name}:{n}" for name, n in needs.licenses.items() if name not in there]
    found = []
    for option, more in (("gres", gres), ("licenses", licenses)):
        own = [item for item in _items(given.last_value(option)) if item != "none"]
        if more:
            found.append(f"--{option}={','.join((*own, *more))}")
    return found


def parse_granted(field: str) -> Mapping[str, Grant]:
    """Parse the ``GRES=`` field of ``scontrol show job -d`` for one node."""
    if not field or field == "(null)":
        return {}
    if not re.fullmatch(rf"{_GRANT}(?:,{_GRANT})*", field, re.ASCII):
        raise HostFault(f"scontrol show job: invalid GRES={field[:80]}")
    found: dict[str, Grant] = {}
    for name, kind, indexed, ids, counted in re.findall(_GRANT, field, re.ASCII):
        with name_errors("scontrol show job", ValueError):
            devices = hostlist.numbers(ids, _MOST_DEVICES) if ids else ()
        for each in dict.fromkeys((f"gres/{name}", f"gres/{name}:{kind}" if kind else "")):
            had = found.get(each, Grant(0))
            more = () if name in _SHARED else devices
            if each:
                found[each] = Grant(had.count + int(indexed or counted), had.devices + more)
    return found


def _items(text: str | None) -> list[str]:
    return [item.strip() for item in (text or "").split(",") if item.strip()]


def _parts(item: str) -> tuple[str, str, int]:
    """Split ``NAME[:TYPE][:COUNT]``; the default count is 1."""
    name, *rest = item.split(":")
    match = _COUNT.fullmatch(rest[-1]) if rest else None
    count = int(match[1]) * _UNITS[match[2].lower()] if match else 1
    return name, ":".join(rest[:-1] if match else rest), count
