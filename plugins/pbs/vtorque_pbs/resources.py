"""Resource requests of a VM job to Torque and OpenPBS, merged with the user's request. No I/O.

See pbs_resources(7B) of Torque and of OpenPBS ("select", "nodes").
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress

from vtorque_core.api import UsageError, walltime
from vtorque_core.api.batch_system import Needs
from vtorque_pbs import convention as pbs
from vtorque_pbs import countable_resources, mixed_requests

_PPN = re.compile(r"ppn=([0-9]{1,6})", re.ASCII)
_COUNT = re.compile(r"[0-9]{1,6}", re.ASCII)
_NCPUS = re.compile(r"(^|,|^-[A-Za-z]*l)ncpus=([0-9]{1,6})(?=,|$)", re.ASCII)
# Torque: other ways to request processors, with which nodes= cannot be combined.
_OTHER_SHAPE = frozenset({"procs", "size"})
_SHARING = frozenset({"excl", "exclhost", "shared"})  # of place=, pbs_resources(7B)
_MEMORY = ("mem", "pmem", "vmem", "pvmem")


@dataclass(frozen=True)
class PbsRequest:
    """CPUs and MiB per node that a user requests; None if not requested."""

    cpus: int | None
    mib: int | None


# -- Torque -----------------------------------------------------------------------------------


def torque_given(resources: Mapping[str, str], feature: str = "") -> PbsRequest:
    """Return the CPUs and MiB that a job requests on the node with the fewest CPUs.

    ``feature`` is the property of VM nodes. In a mixed request, only parts of ``nodes=`` with
    this property count.
    """
    parts = _chunks(resources.get("nodes", ""))[0]
    chunks = list(compress(parts, mixed_requests.select_guest_parts(parts, feature)))
    ppns = [int(match[1]) for chunk in chunks if (match := _PPN.search(chunk))]
    cpus = min(ppns) if ppns and len(ppns) == len(chunks) else None
    if not chunks and resources.get("ncpus", "").isdecimal():
        cpus = int(resources["ncpus"])
    return PbsRequest(cpus, torque_memory(resources, cpus or 1, _node_count(parts)))


def torque_memory(resources: Mapping[str, str], cpus: int, nodes: int) -> int | None:
    """Return a job's memory limit on one node in MiB, or None if unlimited.

    ``mem`` applies to the whole job and ``pmem`` to a process. If both are missing, ``vmem`` and
    ``pvmem`` count.
    """
    for whole, each in (("mem", "pmem"), ("vmem", "pvmem")):
        if (mib := _mib(resources.get(whole))) is not None:
            return mib // nodes
        if (mib := _mib(resources.get(each))) is not None:
            return mib * cpus
    return None


def torque_additions(resources: Mapping[str, str], needs: Needs, feature: str) -> dict[str, str]:
    """Return the ``-l`` values that vsub adds to qsub for a VM job.

    ``nodes`` gets ``feature``, the property of VM nodes, and missing values of ``ppn`` and
    ``gpus``. ``mem``, a limit for all nodes together, is added unless the user limits memory. In
    a mixed request, bare-metal parts do not change, and ``mem`` is not added because it would
    limit these parts, too.

    Raises:
        Refused: A bare-metal part precedes a part with guests.
        UsageError: The additions conflict with the user's request.
    """
    found: dict[str, str] = {}
    is_mixed = False
    chunks, tail = _chunks(resources.get("nodes", ""))
    if not (chunks or _OTHER_SHAPE & set(resources)):
        chunks = ["1"]
    cpus = int(resources["ncpus"]) if resources.get("ncpus", "").isdecimal() else needs.cpus
    if chunks:
        nodes, is_mixed = _mend_chunks(chunks, cpus, feature, needs)
        if nodes + tail != resources.get("nodes"):
            found["nodes"] = nodes + tail
    elif needs.resources and countable_resources.GPUS not in resources:
        raise UsageError(
            f"guests need {countable_resources.GPUS} on each node: request -l nodes=N:ppn=M"
        )
    found |= countable_resources.torque_licenses(resources, needs)
    if needs.mib is not None and not is_mixed and not {*_MEMORY} & set(resources):
        found["mem"] = f"{needs.mib * _node_count(chunks)}mb"
    return found | _extend_walltime(resources, needs)


def is_by_ncpus(resources: Mapping[str, str]) -> bool:
    """Return whether only ``ncpus=`` determines the processors of a Torque job."""
    return "ncpus" in resources and not {"nodes", *_OTHER_SHAPE} & set(resources)


def nodes_for_ncpus(words: Sequence[str]) -> list[str]:
    """Replace ``-l ncpus=N`` in qsub's arguments with ``-l nodes=1:ppn=N``.

    qsub rejects ``nodes`` together with ``ncpus``, and node properties need ``nodes``.
    """
    found = list(words)
    for at, word in enumerate(words):
        tried = [*found[:at], _NCPUS.sub(r"\1nodes=1:ppn=\2", word), *found[at + 1 :]]
        before, after = (pbs.split_qsub(each) for each in (found, tried))
        changed = set(before.options) ^ set(after.options)
        if before.operands == after.operands and {letter for letter, _ in changed} <= {"l"}:
            found = tried
    return found


def _chunks(nodes: str) -> tuple[list[str], str]:
    """Split ``2:ppn=4:x+host:ppn=1#shared`` into the parts between ``+``, and ``#shared``."""
    parts, mark, tail = nodes.partition("#")
    return [part for part in parts.split("+") if part], mark + tail


def _mend_chunks(chunks: Sequence[str], cpus: int, feature: str, needs: Needs) -> tuple[str, bool]:
    guests = mixed_requests.select_guest_parts(chunks, feature)
    mixed_requests.require_guests_first(guests)
    mended = (
        _chunk(chunk, cpus, feature, needs) if its else chunk
        for chunk, its in zip(chunks, guests, strict=True)
    )
    return "+".join(mended), not all(guests)


def _chunk(chunk: str, cpus: int, feature: str, needs: Needs) -> str:
    if not _PPN.search(chunk):
        first, *rest = chunk.split(":")
        chunk = ":".join([first, f"ppn={cpus}", *rest])
    chunk = countable_resources.torque_chunk(chunk, needs)
    return f"{chunk}:{feature}" if feature and feature not in chunk.split(":") else chunk


def _node_count(chunks: list[str]) -> int:
    counts = [_COUNT.fullmatch(chunk.split(":", maxsplit=1)[0]) for chunk in chunks]
    return max(1, sum(int(count[0]) if count else 1 for count in counts))


# -- OpenPBS ----------------------------------------------------------------------------------


def openpbs_given(resources: Mapping[str, str], feature: str = "") -> PbsRequest:
    """Return the smallest number of CPUs and MiB that a job requests in one chunk.

    A job without ``select=`` requests ``nodes=`` as on Torque, or ``ncpus=`` and ``mem=``.
    ``feature`` is the boolean resource of VM jobs. In a mixed request, only chunks with this
    resource count.
    """
    if "select" not in resources and "nodes" in resources:
        return torque_given(resources, feature)
    if "select" in resources:
        parts = resources["select"].split("+")
        its = compress(parts, mixed_requests.select_guest_parts(parts, feature))
        chunks = [_pairs(chunk) for chunk in its]
        cpus = [int(c["ncpus"]) for c in chunks if c.get("ncpus", "").isdecimal()]
        mibs = [mib for c in chunks if (mib := _mib(c.get("mem"))) is not None]
        return PbsRequest(
            min(cpus) if len(cpus) == len(chunks) else None,
            min(mibs) if len(mibs) == len(chunks) else None,
        )
    ncpus = resources.get("ncpus", "")
    return PbsRequest(int(ncpus) if ncpus.isdecimal() else None, _mib(resources.get("mem")))


def openpbs_additions(resources: Mapping[str, str], needs: Needs, feature: str) -> dict[str, str]:
    """Return the ``-l`` values that vsub adds to qsub for a VM job.

    They contain the user's ``select``, in which each chunk with guests has additions. A job in the
    old style (``nodes=``, or ``ncpus=`` without ``select``) stays in that style, because qsub
    rejects a mixture of both.

    Raises:
        Refused: A bare-metal chunk precedes a chunk with guests.
        UsageError: The additions conflict with the user's request.
    """
    found: dict[str, str] = {}
    if "nodes" in resources and "select" not in resources:
        chunks, tail = _chunks(resources["nodes"])
        countable_resources.openpbs_job(resources, needs)
        nodes, is_mixed = _mend_chunks(chunks, needs.cpus, feature, needs)
        found = {"nodes": nodes + tail} if nodes + tail != resources["nodes"] else {}
        if needs.mib is not None and not is_mixed and "mem" not in resources:
            found["mem"] = f"{needs.mib * _node_count(chunks)}mb"
    elif "select" not in resources and {"ncpus", "mem", "host", "vnode"} & set(resources):
        wanted = {"ncpus": str(needs.cpus)}
        wanted |= {"mem": f"{needs.mib}mb"} if needs.mib is not None else {}
        wanted |= {feature: "True"} if feature else {}
        found = {name: value for name, value in wanted.items() if name not in resources}
        found |= countable_resources.openpbs_job(resources, needs)
    else:
        chunks = resources.get("select", "1").split("+")
        guests = mixed_requests.select_guest_parts(chunks, feature)
        mixed_requests.require_guests_first(guests)
        select = "+".join(
            _select(chunk, needs, feature) if its else chunk
            for chunk, its in zip(chunks, guests, strict=True)
        )
        found = {"select": select} if select != resources.get("select") else {}
    return (
        found
        | countable_resources.openpbs_licenses(resources, needs)
        | _extend_walltime(resources, needs)
    )


def _select(chunk: str, needs: Needs, feature: str) -> str:
    pairs = _pairs(chunk)
    more = [f"ncpus={needs.cpus}"] * ("ncpus" not in pairs)
    more += [f"mem={needs.mib}mb"] * (needs.mib is not None and "mem" not in pairs)
    more += countable_resources.openpbs_chunk(chunk, needs)
    more += [f"{feature}=True"] * bool(feature and feature not in pairs)
    return ":".join([chunk, *more])


def _pairs(chunk: str) -> dict[str, str]:
    words = (word.partition("=") for word in chunk.split(":"))
    return {name: value for name, _, value in words}


# -- both -------------------------------------------------------------------------------------


def exclusive_place(wanted: str, resources: Mapping[str, str]) -> dict[str, str]:
    """Return the ``-l`` value with which the site requests exclusive nodes, or {}.

    The value keeps words such as ``pack`` of the user's ``place``. Returns {} if the site sets
    nothing, or if the user has set a sharing mode. Also returns {} for ``place`` without
    ``select``, because OpenPBS rejects that.

    Args:
        wanted: The site's ``name=value``, or "".
        resources: The user's ``-l`` values and those that vsub adds.
    """
    name, _, value = wanted.partition("=")
    own = resources.get(name, "")
    if not name or (name == "place" and "select" not in resources):
        return {}
    if name != "place":
        return {} if own else {name: value}
    if _SHARING & set(own.split(":")):
        return {}
    return {name: f"{own}:{value}" if own else value}


def walltime_seconds(text: str) -> float | None:
    """Convert a ``walltime`` to seconds, or return None if it is invalid."""
    with contextlib.suppress(ValueError):
        return walltime(text)
    return None


def hosts(exec_host: str) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Return a job's nodes, first node first, and the number of processes on each.

    ``exec_host`` is Torque's ``vm/0-3+vmb/0,2`` or ``vm/0+vm/1``, or OpenPBS's ``vm/0*2+vmb/0``.
    """
    slots: dict[str, int] = {}
    for name, count in parse_exec_host(exec_host):
        slots[name] = slots.get(name, 0) + count
    return tuple(slots), tuple(slots.values())


def parse_exec_host(exec_host: str) -> Iterator[tuple[str, int]]:
    """Yield the node and the number of processes of each item in ``exec_host``."""
    for part in exec_host.split("+"):
        name, _, where = part.strip().partition("/")
        numbers, _, times = where.partition("*")
        if not name:
            continue
        if times.isdecimal():
            yield name, int(times)
            continue
        count = 0
        for span in numbers.split(","):
            first, _, last = span.partition("-")
            is_span = first.isdecimal() and last.isdecimal()
            count += int(last) - int(first) + 1 if is_span else 1
        yield name, max(count, 1)


def _extend_walltime(resources: Mapping[str, str], needs: Needs) -> dict[str, str]:
    seconds = walltime_seconds(resources.get("walltime", ""))
    if not needs.seconds or seconds is None:
        return {}  # the site sets the queue's default
    return {"walltime": pbs.show_walltime(math.ceil(seconds + needs.seconds))}


def _mib(text: str | None) -> int | None:
    with contextlib.suppress(ValueError):
        return None if text is None else pbs.mem_mib(text)
    return None
