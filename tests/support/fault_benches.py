"""The jobs of the fault matrix: all installed plugins, on one node and on two."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import device_cases
from device_cases import DEVICES
from fault_matrix import FaultBench, FaultResult, Point, try_all
from matrix_faults import FAULTS
from vtorque_testing.faults import orphans

BENCHES = {
    "one": "one guest on one node, with all that the installed plugins can give it, beside "
    "another job of the same user",
    "two": "two guests on each of two nodes, the same; what strikes the first node must not "
    "change the second",
}


@contextlib.contextmanager
def bench(name: str, top: Path, only: tuple[str, ...] = tuple(DEVICES)) -> Iterator[FaultBench]:
    """Yield the nodes of one of BENCHES below ``top``, and check at the end that nothing is left.

    ``only``: with these device plugins and no other plugin.
    """
    case = device_cases.together(only)
    plugins = device_cases.load(None if only == tuple(DEVICES) else only)
    if name == "two":  # the second node's manager moves its interrupts at any time
        case = dataclasses.replace(case, settings={**case.settings, "iocm": {"interval": "5s"}})
    count = {"one": 1, "two": 2}[name]
    names = tuple(f"n{number}" for number in range(1, count + 1))
    pairs = {**case.pairs, "vms_per_node": str(count), "vcpus": "2"}
    nodes, jobs = [], []
    for node_name in names:
        node = device_cases.node(
            top / node_name, plugins, case, tables={"node": {"name": node_name}}
        )
        for path in (node.top / "irq").rglob("smp_affinity_list"):
            path.write_text("0-127")  # as after a release
        nodes.append(node)
        jobs.append(dataclasses.replace(node.job(pairs), node=node_name, nodes=names))
    other = nodes[0].job({"ram": "128M"}, job_id="2") if name == "one" else None
    with orphans() as processes:
        made = FaultBench(nodes, jobs, other, processes)
        yield made
        made.end_others()


def strike(task: tuple[str, str]) -> tuple[list[Point], list[FaultResult]]:
    """Return the steps of a bench, and the effects of one fault at all of them."""
    name, fault = task
    with tempfile.TemporaryDirectory(prefix="vtorque-matrix-") as top, bench(name, Path(top)) as b:
        return try_all(b, [FAULTS[fault]])


def marks(name: str) -> tuple[str, str]:
    """Return the lines around the generated part of that name."""
    return f"<!-- {name}: scripts/fault-matrix writes this -->\n", f"<!-- end of {name} -->\n"


def written(page: str, tables: Mapping[str, str]) -> str:
    """Return the page with these tables between their marks. Raises ValueError: no such marks."""
    for name, text in tables.items():
        begin, end = marks(name)
        before, _, rest = page.partition(begin)
        _, found, after = rest.partition(end)
        if not found:
            raise ValueError(f"no marks for {name}")
        page = f"{before}{begin}{text}\n{end}{after}"
    return page


def table_of(page: str, name: str) -> list[str]:
    """Return the lines between the marks."""
    begin, end = marks(name)
    return page.partition(begin)[2].partition(end)[0].splitlines()
