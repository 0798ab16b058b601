"""``vmgr ps --placement``: which jobs hold this node's cores, memory and devices."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click

from vtorque_core.api import UsageError, printable, show_mib, tables
from vtorque_core.api.host_topology import NumaNode, parse_cpus, show_cpus
from vtorque_core.live.placement import CORE, CPUS, MEMORY, JobLeases, NodeLeases, node_leases
from vtorque_core.live.site_config import load
from vtorque_jobs.command import by_number

_NODES = ("NODE", "CPUS", "THE HOST'S", "FREE CPUS", "MEMORY", "FREE MEMORY", "HUGE PAGES")
_GUESTS = ("JOB", "OWNER", "CPUS", "GUEST", "ITS OWN CPUS", "MEMORY", "ITEMS")


def show(config: Path, as_json: bool) -> None:
    """Print the placement of all guests on this node. Raise UsageError unless called by root."""
    site, _ = load(config, node=False)
    if os.geteuid() != site.owner:
        raise UsageError("only root can show the placement of all jobs: ask your administrator")
    found = describe(node_leases(site))
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        show_tables(found)


def show_tables(found: dict[str, Any]) -> None:
    """Print the result of :func:`describe`: one row per NUMA node, then one per guest."""
    tables.show(_NODES, [_node(node, found) for node in found["nodes"]])
    guests = [_guest(job, guest) for job in found["jobs"] for guest in job["guests"]]
    tables.show(_GUESTS, guests, () if guests else ("no guests on this node",))


def describe(node: NodeLeases) -> dict[str, Any]:
    """Return the leases of all jobs on this node, as for ``--json``."""
    machine = node.share.machine
    return {
        "nodes": [
            {
                "id": each.id,
                "cores": [list(core) for core in machine.cores if set(core) & set(each.cpus)],
                "mib": each.mem_mib,
                "taken_mib": node.taken.mib_on.get(each.id, 0),
                "huge_pages": _pages(each, node),
            }
            for each in machine.nodes
        ],
        "host": {"cpus": list(node.share.reserved), "mib": node.share.reserve_mib},
        "jobs": [
            _job(job) for job in sorted(node.jobs, key=lambda job: by_number(job.id)) if job.leases
        ],
    }


def _pages(each: NumaNode, node: NodeLeases) -> list[dict[str, int]]:
    return [
        {"kib": kib, "mib": kib * n // 1024, "taken_mib": node.taken.pages.get((each.id, kib), 0)}
        for kib, n in sorted(each.pages.items())
    ]


def _job(job: JobLeases) -> dict[str, Any]:
    guests: dict[int, dict[str, Any]] = {}
    cpus: tuple[int, ...] = ()
    for index, lease in job.leases:
        if lease.pool == CPUS:
            cpus = parse_cpus(lease.cpus)
        if index is None:
            continue
        fresh = {"index": index, "cores": {}, "mib": 0, "nodes": [], "items": {}}
        guest = guests.setdefault(index, fresh)
        if lease.pool == CORE:
            guest["cores"].setdefault(lease.use or "own", []).append(int(lease.item))
        elif lease.pool == MEMORY:
            guest["mib"] += lease.mib
            guest["nodes"] = sorted({*guest["nodes"], lease.node} - {-1})
        else:
            guest["items"].setdefault(lease.pool, []).append(lease.item)
    each = [guests[index] for index in sorted(guests)]
    return {"id": job.id, "owner": job.owner, "cpus": list(cpus), "guests": each}


def _node(node: dict[str, Any], found: dict[str, Any]) -> tuple[str, ...]:
    cpus = {cpu for core in node["cores"] for cpu in core}
    host = cpus & set(found["host"]["cpus"])
    free = cpus - host - {cpu for job in found["jobs"] for cpu in job["cpus"]}
    pages = [
        f"{show_mib(page['mib'])} of {page['kib']} KiB, "
        f"{show_mib(page['mib'] - page['taken_mib'])} free"
        for page in node["huge_pages"]
    ]
    return (
        str(node["id"]),
        *(show_cpus(some) or "-" for some in (cpus, host, free)),
        show_mib(node["mib"]),
        show_mib(max(0, node["mib"] - node["taken_mib"])),
        "; ".join(pages) or "-",
    )


def _guest(job: dict[str, Any], guest: dict[str, Any]) -> tuple[str, ...]:
    where = ",".join(map(str, guest["nodes"]))
    own = [f"{use} {show_cpus(cpus)}" for use, cpus in sorted(guest["cores"].items())]
    items = [f"{pool} {' '.join(names)}" for pool, names in sorted(guest["items"].items())]
    return (
        printable(job["id"], 60),
        printable(job["owner"], 40),
        show_cpus(job["cpus"]) or "not known",
        str(guest["index"]),
        ", ".join(own) or "-",
        show_mib(guest["mib"]) + (f" on node {where}" if where else ""),
        printable(", ".join(items), 200) or "-",
    )
