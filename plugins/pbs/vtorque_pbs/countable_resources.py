"""Countable resources in PBS: requests of a job and allocations on a node. No I/O.

Torque counts only GPUs per node (``gpus``, pbs_resources(7B)); its schedulers count licenses
(``gres``). OpenPBS counts any resource per chunk, and licenses per job.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping

from vtorque_core.api import UsageError
from vtorque_core.api.batch_system import Grant, Needs

GPUS = "gpus"
EXCLUSIVE = "exclusive_process"
_GPUS = re.compile(r"(?<![^:+])gpus=([0-9]{1,6})(?=[:+#]|$)", re.ASCII)
_MODES = re.compile(r"(?<![^:+])(exclusive\w*|shared|default)(?=[:+#]|$)", re.ASCII | re.IGNORECASE)


def torque_counts(resources: Mapping[str, str]) -> dict[str, int]:
    """Return the counts in ``gres=``, and the smallest ``gpus=`` in ``nodes=``."""
    found = dict(_gres(resources))
    gpus = [int(n) for n in _GPUS.findall(resources.get("nodes", ""))]
    if gpus or resources.get(GPUS, "").isdecimal():
        found[GPUS] = min(gpus) if gpus else int(resources[GPUS])
    return found


def torque_chunk(chunk: str, needs: Needs) -> str:
    """Add GPUs to a chunk of ``nodes=``, in exclusive mode, so that jobs do not share the GPUs."""
    if needs.resources.get(GPUS) and not _GPUS.search(chunk):
        chunk += f":gpus={needs.resources[GPUS]}"
    if needs.resources.get(GPUS) and not _MODES.search(chunk):
        chunk = _GPUS.sub(rf"\g<0>:{EXCLUSIVE}", chunk)
    return chunk


def torque_licenses(resources: Mapping[str, str], needs: Needs) -> dict[str, str]:
    """Return ``gres`` for a needed license that the user has not requested.

    Raises:
        UsageError: The job needs a node resource other than GPUs, or several licenses. The syntax
            of ``gres`` for several licenses depends on the scheduler.
    """
    if others := set(needs.resources) - {GPUS}:
        raise UsageError(f"{min(others)}: not supported on Torque, which only counts gpus of nodes")
    there = dict(_gres(resources))
    missing = [f"{name}:{n}" for name, n in needs.licenses.items() if name not in there]
    if missing and (there or len(missing) > 1):
        raise UsageError(
            f"the job needs {' and '.join(missing)}: request all of them in one -l gres="
        )
    return {"gres": missing[0]} if missing else {}


def _gres(resources: Mapping[str, str]) -> Iterator[tuple[str, int]]:
    for item in re.split("[+%,]", resources.get("gres", "")):
        name, _, count = item.partition(":")
        if name:
            yield name, int(count) if count.isdecimal() else 1


def torque_granted(exec_gpus: str, nodes: str, node: str) -> dict[str, Grant]:
    """Return a job's GPUs on one node.

    Args:
        exec_gpus: From the server: ``n1-gpu/0+n1-gpu/1`` (node_manager.c).
        nodes: ``Resource_List.nodes``. GPUs that other jobs may share are omitted from the result.
        node: The node's name.
    """
    parts = [part.strip().rpartition("/") for part in exec_gpus.split("+")]
    found = tuple(int(n) for name, _, n in parts if name == f"{node}-gpu" and n.isdecimal())
    chunks = [chunk for chunk in nodes.split("+") if _GPUS.search(chunk)]
    modes = [mode.lower() for chunk in chunks for mode in _MODES.findall(chunk) or [""]]
    alone = all(mode.startswith("exclusive") for mode in modes) and len(modes) > 0
    return {GPUS: Grant(len(found), found)} if found and alone else {}


def openpbs_counts(resources: Mapping[str, str]) -> dict[str, int]:
    """Return the smallest count of each resource, over the job's ``-l`` values and its chunks."""
    found = {name: int(n) for name, n in resources.items() if n.isdecimal()}
    for chunk in resources.get("select", "").split("+"):
        for name, count in _counts(chunk):
            found[name] = min(count, found.get(name, count))
    return found


def openpbs_chunk(chunk: str, needs: Needs) -> list[str]:
    """Return the resource requests (``name=count``) that a chunk lacks."""
    there = dict(_counts(chunk))
    return [f"{name}={n}" for name, n in needs.resources.items() if name not in there]


def openpbs_job(resources: Mapping[str, str], needs: Needs) -> dict[str, str]:
    """Return the resources that a job without ``select`` must request in addition.

    Raises:
        UsageError: The job requests ``nodes``, to which no resource can be added.
    """
    missing = {name: n for name, n in needs.resources.items() if name not in resources}
    if missing and "nodes" in resources:
        name, count = missing.popitem()
        raise UsageError(f"the job needs {name} on each node: request -l select=N:{name}={count}")
    return {name: str(count) for name, count in missing.items()}


def openpbs_licenses(resources: Mapping[str, str], needs: Needs) -> dict[str, str]:
    """Return the needed licenses that the user has not requested."""
    return {name: str(n) for name, n in needs.licenses.items() if name not in resources}


def openpbs_granted(chunks: Iterable[Mapping[str, str]], assigned: bytes) -> dict[str, Grant]:
    """Return a job's resources on one node by name.

    Args:
        chunks: This node's chunks in ``exec_vnode``.
        assigned: The record of the hook pbs_cgroups for the job, or empty. Only this record
            identifies the GPUs: its ``device_names``, such as ``nvidia0`` (pbs_cgroups.PY).
    """
    counts: dict[str, int] = {}
    for chunk in chunks:
        for name, text in chunk.items():
            if text.isdecimal():
                counts[name] = counts.get(name, 0) + int(text)
    found = {name: Grant(count) for name, count in counts.items()}
    noted = json.loads(assigned) if assigned else {}
    names = [name for name in noted.get("device_names", ()) if not name.startswith("mic")]
    gpus = [re.fullmatch(r"nvidia([0-9]{1,4})", name, re.ASCII) for name in names]
    devices = tuple(int(match[1]) for match in gpus if match)
    if len(devices) == len(names) == counts.get("ngpus", 0):
        found["ngpus"] = Grant(len(devices), devices)
    return found


def _counts(chunk: str) -> Iterator[tuple[str, int]]:
    for word in chunk.split(":"):
        name, _, count = word.partition("=")
        if count.isdecimal():
            yield name, int(count)
