"""``vmgr ps --placement``: whose this node's cores, memory and pool items are, as a picture.

NUMA node 0: 4 cores, 8G, 6G not taken
  cores [hh][AA][a.][..]
A 42.srv ada: CPUs 1-2,5
    guest 0:  vcpu 1,5  2G on node 0
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from string import ascii_uppercase
from typing import Any

import click

from vtorque_core import host, ledger
from vtorque_core.api_topology import NumaNode
from vtorque_core.cli.site import load
from vtorque_core.errors import UsageError, printable
from vtorque_core.journal import JournalState
from vtorque_core.node_share import NodeShare, Taken
from vtorque_core.topology import cpu_list, show_cpus
from vtorque_core.units import show_mib

_LEGEND = (
    "upper case: a guest's own; lower case: the job's, shared by its guests; * several jobs'; "
    "h the host's; . free; [SMT siblings]"
)
_COLORS = ("cyan", "green", "yellow", "magenta", "blue", "red")
_IN_A_LINE = 16  # cores


def show(config: Path, as_json: bool) -> None:
    """Print the placement of all guests on this node. Raises UsageError for others than root."""
    if os.geteuid() != 0:
        raise UsageError("the placement of all jobs is root's: ask your administrator")
    site, _ = load(config, node=False)
    machine = host.topology(site.node.libvirt_uri)
    share = NodeShare(
        machine.cpus,
        machine.mem_mib,
        reserve_cores=site.node.host_reserve_cores,
        reserve_mib=site.node.host_reserve_ram,
        topology=machine,
    )
    found = describe(ledger.states(site.paths), share)
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    lines = picture(found)
    click.echo("\n".join(lines) if not os.isatty(1) else _colored(lines))


def _colored(lines: Sequence[str]) -> str:
    from rich.console import Console  # noqa: PLC0415 - 60 ms, for a terminal only
    from rich.text import Text  # noqa: PLC0415

    console = Console(highlight=False)
    with console.capture() as captured:
        for line in lines:
            text = Text(line)
            if line.startswith("  cores "):
                for match in re.finditer(r"([A-Za-gi-z])\1*", line[8:]):
                    color = _COLORS[(ord(match[0][0].upper()) - ord("A")) % len(_COLORS)]
                    bold = "bold " if match[0].isupper() else ""
                    text.stylize(f"{bold}{color}", match.start() + 8, match.end() + 8)
            console.print(text, soft_wrap=True)
    return captured.get().rstrip("\n")


def describe(states: Sequence[JournalState], share: NodeShare) -> dict[str, Any]:
    """Return all that the ledger knows of this node, as ``--json`` prints it. Pure."""
    machine, taken = share.machine, ledger.taken_by(states)
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
        "jobs": [_job(state) for state in states if state.leases],
    }


def _pages(node: NumaNode, taken: Taken) -> list[dict[str, int]]:
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
        "id": state.header.id,
        "owner": state.header.owner,
        "cpus": list(cpus),
        "guests": [guests[index] for index in sorted(guests)],
    }


def picture(found: dict[str, Any]) -> list[str]:
    """Return the lines of the picture. Pure."""
    known = [letter for letter in ascii_uppercase if letter != "H"]
    letters = [known[n % len(known)] for n in range(len(found["jobs"]))]
    lines = []
    for node in found["nodes"]:
        lines.append(
            f"NUMA node {node['id']}: {len(node['cores'])} cores, {show_mib(node['mib'])}, "
            f"{show_mib(max(0, node['mib'] - node['taken_mib']))} not taken"
        )
        for page in node["huge_pages"]:
            free = show_mib(page["mib"] - page["taken_mib"])
            lines.append(f"  huge pages of {page['kib']} KiB: {show_mib(page['mib'])}, {free} free")
        marks = ["".join(_mark(cpu, found, letters) for cpu in core) for core in node["cores"]]
        if any(len(mark) > 1 for mark in marks):
            marks = [f"[{mark}]" for mark in marks]
        lines += [
            f"  cores {''.join(marks[i : i + _IN_A_LINE])}"
            for i in range(0, len(marks), _IN_A_LINE)
        ]
    for letter, job in zip(letters, found["jobs"], strict=True):
        name = f"{printable(job['id'], 60)} {printable(job['owner'], 40)}"
        lines.append(f"{letter} {name}: CPUs {show_cpus(tuple(job['cpus'])) or 'not known'}")
        lines += [f"    {_guest_line(guest)}" for guest in job["guests"]]
    return [*lines, _LEGEND if found["jobs"] else "no guests on this node"]


def _mark(cpu: int, found: dict[str, Any], letters: Sequence[str]) -> str:
    """Return one character: whose a CPU is."""
    sharing = []
    for letter, job in zip(letters, found["jobs"], strict=True):
        if any(cpu in cpus for guest in job["guests"] for cpus in guest["cores"].values()):
            return letter
        if cpu in job["cpus"]:
            sharing.append(letter.lower())
    if sharing:
        return sharing[0] if len(sharing) == 1 else "*"
    return "h" if cpu in found["host"]["cpus"] else "."


def _guest_line(guest: dict[str, Any]) -> str:
    where = ",".join(map(str, guest["nodes"]))
    cores = [f"{use} {show_cpus(tuple(cpus))}" for use, cpus in sorted(guest["cores"].items())]
    items = [
        f"{printable(pool, 40)} {printable(' '.join(names), 80)}"
        for pool, names in sorted(guest["items"].items())
    ]
    memory = show_mib(guest["mib"]) + (f" on node {where}" if where else "")
    return "  ".join([f"guest {guest['index']}:", *cores, memory, *items])
