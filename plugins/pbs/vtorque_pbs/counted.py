"""What PBS counts beside CPUs and memory: what a job asks for, and what it has on a node. Pure.

Torque: ``gpus`` of nodes (pbs_resources(7B)), and ``gres`` of its schedulers for licences. OpenPBS:
resources of chunks, and for licences of the job.
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


def torque_asked(resources: Mapping[str, str]) -> dict[str, int]:
    """Return what ``nodes=`` asks for on the smallest node that has some, and ``gres=``."""
    found = dict(_gres(resources))
    gpus = [int(n) for n in _GPUS.findall(resources.get("nodes", ""))]
    if gpus or resources.get(GPUS, "").isdecimal():
        found[GPUS] = min(gpus) if gpus else int(resources[GPUS])
    return found


def torque_chunk(chunk: str, needs: Needs) -> str:
    """Return a part of ``nodes=`` with its GPUs, for this job alone: a server may share them."""
    if needs.resources.get(GPUS) and not _GPUS.search(chunk):
        chunk += f":gpus={needs.resources[GPUS]}"
    if needs.resources.get(GPUS) and not _MODES.search(chunk):
        chunk = _GPUS.sub(rf"\g<0>:{EXCLUSIVE}", chunk)
    return chunk


def torque_licenses(resources: Mapping[str, str], needs: Needs) -> dict[str, str]:
    """Return ``gres`` for a licence that is not asked for. Raises UsageError.

    How several stand in one is the scheduler's own: Torque's takes note of none.
    """
    if others := set(needs.resources) - {GPUS}:
        raise UsageError(f"{min(others)}: of nodes' resources Torque counts gpus only")
    there = dict(_gres(resources))
    missing = [f"{name}:{n}" for name, n in needs.licenses.items() if name not in there]
    if missing and (there or len(missing) > 1):
        raise UsageError(f"the job needs {' and '.join(missing)}: ask for all in one -l gres=")
    return {"gres": missing[0]} if missing else {}


def _gres(resources: Mapping[str, str]) -> Iterator[tuple[str, int]]:
    for item in re.split("[+%,]", resources.get("gres", "")):
        name, _, count = item.partition(":")
        if name:
            yield name, int(count) if count.isdecimal() else 1


def torque_granted(exec_gpus: str, nodes: str, node: str) -> dict[str, Grant]:
    """Return a job's GPUs on one node.

    Args:
        exec_gpus: as the server says them: ``n1-gpu/0+n1-gpu/1`` (node_manager.c).
        nodes: what was asked for: GPUs that others may have too are none of the job's.
        node: the node's name.
    """
    parts = [part.strip().rpartition("/") for part in exec_gpus.split("+")]
    found = tuple(int(n) for name, _, n in parts if name == f"{node}-gpu" and n.isdecimal())
    chunks = [chunk for chunk in nodes.split("+") if _GPUS.search(chunk)]
    modes = [mode.lower() for chunk in chunks for mode in _MODES.findall(chunk) or [""]]
    alone = all(mode.startswith("exclusive") for mode in modes) and len(modes) > 0
    return {GPUS: Grant(len(found), found)} if found and alone else {}


def openpbs_asked(resources: Mapping[str, str]) -> dict[str, int]:
    """Return what the smallest chunk that names it asks for, by resource; else the job itself."""
    found = {name: int(n) for name, n in resources.items() if n.isdecimal()}
    for chunk in resources.get("select", "").split("+"):
        for name, count in _counts(chunk):
            found[name] = min(count, found.get(name, count))
    return found


def openpbs_chunk(chunk: str, needs: Needs) -> list[str]:
    """Return the words that a chunk lacks."""
    there = dict(_counts(chunk))
    return [f"{name}={n}" for name, n in needs.resources.items() if name not in there]


def openpbs_job(resources: Mapping[str, str], needs: Needs) -> dict[str, str]:
    """Return what a job asks for in the old style, without ``select``. Raises UsageError."""
    missing = {name: n for name, n in needs.resources.items() if name not in resources}
    if missing and "nodes" in resources:
        name, count = missing.popitem()
        raise UsageError(f"the job needs {name} of each node: ask for -l select=N:{name}={count}")
    return {name: str(count) for name, count in missing.items()}


def openpbs_licenses(resources: Mapping[str, str], needs: Needs) -> dict[str, str]:
    """Return the licences that are not asked for."""
    return {name: str(n) for name, n in needs.licenses.items() if name not in resources}


def openpbs_granted(chunks: Iterable[Mapping[str, str]], assigned: bytes) -> dict[str, Grant]:
    """Return what a job has on one node, by resource.

    Args:
        chunks: what ``exec_vnode`` says of that node.
        assigned: what the hook pbs_cgroups has noted of the job; empty: nothing. It alone knows
            which GPUs, by the number of their device file; ``device_names`` in pbs_cgroups.PY.
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
