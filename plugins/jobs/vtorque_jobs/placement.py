"""``vmgr ps --placement``: which jobs hold this node's cores, memory and devices."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from vtorque_core.api import UsageError, printable, show_mib, tables
from vtorque_core.api.host_topology import NumaNode
from vtorque_core.live.placement import (
    JournalState,
    Leases,
    NodeShare,
    cpu_list,
    ledger,
    node_hardware,
    show_cpus,
    walk,
)
from vtorque_core.live.site_config import load
from vtorque_jobs.command import by_number

_NODES = ("NODE", "CPUS", "THE HOST'S", "FREE CPUS", "MEMORY", "FREE MEMORY", "HUGE PAGES")
_GUESTS = ("JOB", "OWNER", "CPUS", "GUEST", "ITS OWN CPUS", "MEMORY", "ITEMS")


def show(config: Path, as_json: bool) -> None:
    """Print the placement of all guests on this node. Raise UsageError unless called by root."""
    site, _ = load(config, node=False)
    if os.geteuid() != site.owner:
        raise UsageError(
            "the placement of all jobs needs root's privileges: ask your administrator"
        )
    share = NodeShare(
        node_hardware.topology(site.node.libvirt_uri),
        reserve_cores=site.node.host_reserve_cores,
        reserve_mib=site.node.host_reserve_ram,
    )
    found = describe(list(walk(site.paths)), share)
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        show_tables(found)


def show_tables(found: dict[str, Any]) -> None:
    """Print the result of :func:`describe`: one row per NUMA node, then one per guest."""
    tables.show(_NODES, [_node(node, found) for node in found["nodes"]])
    guests = [_guest(job, guest) for job in found["jobs"] for guest in job["guests"]]
    tables.show(_GUESTS, guests, () if guests else ("no guests on this node",))


def describe(states: Sequence[JournalState], share: NodeShare) -> dict[str, Any]:
    """Return the leases of all jobs on this node, as for ``--json``. Reads and writes no file."""
    machine, taken = share.machine, ledger.leased_resources(states)
    return {
        "nodes": [
            {
                "id": node.id,
                "cores": [list(core) for core in machine.cores if set(core) & set(node.cpus)],
                "mib": node.mem_mib,
                "taken_mib": taken.mib_on.get(node.id, 0),
                "huge_pages": _pages(node, taken),
            }
            for node in machine.nodes
        ],
        "host": {"cpus": list(share.reserved), "mib": share.reserve_mib},
        "jobs": [_job(state) for state in sorted(states, key=_number) if state.leases],
    }


def _number(state: JournalState) -> tuple[tuple[int, int | str], ...]:
    return by_number(state.header.job.id)


def _pages(node: NumaNode, taken: Leases) -> list[dict[str, int]]:
    return [
        {"kib": kib, "mib": kib * n // 1024, "taken_mib": taken.pages.get((node.id, kib), 0)}
        for kib, n in sorted(node.pages.items())
    ]


def _job(state: JournalState) -> dict[str, Any]:
    guests: dict[int, dict[str, Any]] = {}
    cpus: tuple[int, ...] = ()
    for lease in state.leases:
        args, pool = lease.args, str(lease.args["pool"])
        if pool == ledger.SHARE:
            cpus = cpu_list(str(args["cpus"]))
        if lease.guest is None:
            continue
        fresh = {"index": lease.guest, "cores": {}, "mib": 0, "nodes": [], "items": {}}
        guest = guests.setdefault(lease.guest, fresh)
        if pool == ledger.CORE:
            guest["cores"].setdefault(str(args.get("use")) or "own", []).append(int(args["item"]))
        elif pool == ledger.MEMORY:
            guest["mib"] += int(args["mib"])
            guest["nodes"] = sorted({*guest["nodes"], int(args.get("node", -1))} - {-1})
        else:
            guest["items"].setdefault(pool, []).append(str(args["item"]))
    return {
        "id": state.header.job.id,
        "owner": state.header.job.owner,
        "cpus": list(cpus),
        "guests": [guests[index] for index in sorted(guests)],
    }


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
        *(show_cpus(tuple(sorted(some))) or "-" for some in (cpus, host, free)),
        show_mib(node["mib"]),
        show_mib(max(0, node["mib"] - node["taken_mib"])),
        "; ".join(pages) or "-",
    )


def _guest(job: dict[str, Any], guest: dict[str, Any]) -> tuple[str, ...]:
    where = ",".join(map(str, guest["nodes"]))
    own = [f"{use} {show_cpus(tuple(cpus))}" for use, cpus in sorted(guest["cores"].items())]
    items = [f"{pool} {' '.join(names)}" for pool, names in sorted(guest["items"].items())]
    return (
        printable(job["id"], 60),
        printable(job["owner"], 40),
        show_cpus(tuple(job["cpus"])) or "not known",
        str(guest["index"]),
        ", ".join(own) or "-",
        show_mib(guest["mib"]) + (f" on node {where}" if where else ""),
        printable(", ".join(items), 200) or "-",
    )
