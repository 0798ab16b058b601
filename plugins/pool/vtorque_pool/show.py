"""The output of ``vtorque pool``: a table, JSON, or metrics in Prometheus' text format."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from vtorque_core.api import printable
from vtorque_core.api.tables import align_rows
from vtorque_pool.machines import CloudState
from vtorque_pool.memory import PoolState
from vtorque_pool.settings import Settings
from vtorque_pool.slurm import PoolNode

STATES = ("building", "free", "busy", "draining", "unusable", "hold", "deleting", "alien", "off")


@dataclass(frozen=True)
class NodeRow:
    """A node or a machine, as a row in the output of ``vtorque pool``.

    ``age`` and ``idle`` are in seconds, ``price`` is per hour.
    """

    node: str
    state: str
    shape: str
    cloud: str
    machine: str
    age: float | None
    idle: float | None
    jobs: tuple[str, ...]
    price: float
    note: str


def rows(
    settings: Settings,
    found: CloudState,
    nodes: Mapping[str, PoolNode],
    held: Mapping[str, str],
    now: float,
) -> list[NodeRow]:
    """Return a row for each machine, and for each node of the pool that is not off."""
    machines = {m.node: m for m in reversed(found.machines) if m.is_live and m.node}
    listed = []
    for shape in settings.shapes:
        for name in shape.names:
            node, machine = nodes.get(name), machines.pop(name, None)
            state: str = node.state if node else "building" if machine else "off"
            if state == "off" and machine is None:
                continue
            state = "hold" if name in held else "deleting" if state == "off" else state
            idle = now - node.idle_since if node and state == "free" and node.idle_since else None
            listed.append(
                NodeRow(
                    name,
                    state,
                    shape.name,
                    shape.cloud,
                    machine.id if machine else "",
                    now - machine.created if machine else None,
                    idle,
                    node.jobs if node else (),
                    shape.price if machine else 0.0,
                    held.get(name) or (node.reason if node else ""),
                )
            )
    for machine in machines.values():
        age = now - machine.created
        listed.append(
            NodeRow(machine.node, "alien", machine.shape, "", machine.id, age, None, (), 0.0, "")
        )
    return listed


def table(
    listed: list[NodeRow], found: CloudState, remembered: PoolState, now: float
) -> Iterator[str]:
    """Yield the lines that ``vtorque pool`` prints."""
    cells = [
        (
            row.node or "-", row.state, row.shape, _age(row.age), _age(row.idle),
            f"{row.price:.3f}" if row.price else "-",
            " ".join(row.jobs) or (f"({row.note})" if row.note else "-"),
        )
        for row in listed
    ]  # fmt: skip
    yield from map(
        printable, align_rows([("NODE", "STATE", "SHAPE", "AGE", "IDLE", "COST/H", "JOBS"), *cells])
    )
    counted = Counter(row.state for row in listed)
    words = ", ".join(f"{counted[state]} {state}" for state in STATES if counted[state])
    total = sum(row.price for row in listed)
    yield f"{words or 'no machines'}{f'; {total:.3f} per hour' if total else ''}"
    for name, until in sorted(remembered.paused.items()):
        if until > now:
            why = remembered.why.get(name, "")
            yield printable(
                f"{name}: paused for {_age(until - now)}: {why}; vtorque pool release {name}", 500
            )
    for cloud, problem in found.silent.items():
        yield printable(f"{cloud} does not answer: {problem}", 500)


def data(
    listed: list[NodeRow], found: CloudState, remembered: PoolState, now: float
) -> dict[str, Any]:
    """Return the data for ``--json``."""
    return {
        "nodes": [asdict(row) for row in listed],
        "paused": {n: until - now for n, until in remembered.paused.items() if until > now},
        "why": remembered.why,
        "counted": {name: asdict(each) for name, each in remembered.counted.items()},
        "silent": dict(found.silent),
    }


def metrics(listed: list[NodeRow], found: CloudState, remembered: PoolState, now: float) -> str:
    """Return the pool's metrics in Prometheus' text format."""
    counted = Counter((row.shape, row.state) for row in listed)
    shapes = sorted({row.shape for row in listed} | set(remembered.counted))
    lines = ["# HELP vtorque_pool_nodes nodes by state", "# TYPE vtorque_pool_nodes gauge"]
    lines += [
        f'vtorque_pool_nodes{{shape="{_label(shape)}",state="{state}"}} {counted[shape, state]}'
        for shape in shapes
        for state in STATES
        if state != "off"
    ]
    for name, kind, meaning in _COUNTERS:
        lines += [f"# HELP {name} {meaning}", f"# TYPE {name} counter"]
        lines += [
            f'{name}{{shape="{_label(s)}"}} {getattr(each, kind)!r}'
            for s, each in sorted(remembered.counted.items())
        ]
    lines += ["# HELP vtorque_pool_paused a shape is paused", "# TYPE vtorque_pool_paused gauge"]
    lines += [f'vtorque_pool_paused{{shape="{_label(s)}"}} {int(remembered.is_paused(s, now))}'
              for s in shapes]  # fmt: skip
    lines += ["# HELP vtorque_pool_silent_clouds clouds that do not answer",
              "# TYPE vtorque_pool_silent_clouds gauge",
              f"vtorque_pool_silent_clouds {len(found.silent)}"]  # fmt: skip
    return "".join(f"{line}\n" for line in lines)


_COUNTERS = (
    ("vtorque_pool_starts_total", "starts", "created machines"),
    ("vtorque_pool_failures_total", "failures", "machines that failed or never registered"),
    ("vtorque_pool_registered_total", "registered", "machines whose node has registered"),
    ("vtorque_pool_ready_seconds_total", "seconds", "time from creation to registration"),
)


def _label(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _age(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    whole = max(0, round(seconds))
    if whole < 120:
        return f"{whole}s"
    return f"{whole // 60}m" if whole < 7200 else f"{whole // 3600}h{whole % 3600 // 60:02}m"
