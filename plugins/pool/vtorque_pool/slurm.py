"""Nodes and jobs of Slurm, read and changed with its commands.

The nodes have ``State=CLOUD`` (slurm.conf(5), https://slurm.schedmd.com/power_save.html). To
recover a node whose start failed, set it DOWN, which requeues its job, then POWER_DOWN (22.05.8).
This needs ``idle_on_node_suspend`` in SlurmctldParameters.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from vtorque_core.api import HostFault, run_tool
from vtorque_pool.hostlist import expand
from vtorque_pool.settings import Settings

State = Literal["off", "building", "free", "busy", "draining", "unusable", "deleting"]
REASON = "vtorque-pool"
TOLD = "drained by an administrator"  # the pool leaves nodes with this reason drained
_SQUEUE = ("squeue", "-h", "-a", "-t", "R,CF,CG,S,SI,SO", "-o", "%i %N")
_SILENT = "Not responding"
_OF_TIMEOUT = "ResumeTimeout reached"


@dataclass(frozen=True)
class PoolNode:
    """A node in the batch system.

    ``idle_since`` and ``since`` (start of its daemon) are Unix times; 0 if unknown.
    """

    name: str
    state: State
    reason: str = ""
    jobs: tuple[str, ...] = ()
    idle_since: float = 0.0
    since: float = 0.0

    @property
    def failed_to_start(self) -> bool:
        """True if Slurm or the pool set the node down because its machine did not start."""
        return self.state == "unusable" and self.reason.startswith((REASON, _OF_TIMEOUT))

    @property
    def is_down_by_hand(self) -> bool:
        """True if the node's reason was set by an admin, not by Slurm or the pool."""
        ours = (REASON, _OF_TIMEOUT, _SILENT)
        return bool(self.reason) and not self.reason.startswith(ours)


class Slurm:
    """The commands of Slurm, run with the setting ``slurm_conf`` as SLURM_CONF."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def nodes(self) -> dict[str, PoolNode]:
        """Return the pool's nodes by name, including nodes that are powered down."""
        wanted = {name for shape in self._settings.shapes for name in shape.names}
        text = self._run("scontrol", "-a", "-o", "show", "nodes")
        jobs = self._jobs()
        found = {}
        for line in text.splitlines():
            said = _words(line)
            name = said.get("NodeName", "")
            if name in wanted:
                found[name] = _node(name, said, tuple(jobs.get(name, ())))
        return found

    def _jobs(self) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for line in self._run(*_SQUEUE).splitlines():
            job, _, nodes = line.strip().partition(" ")
            if nodes.strip():
                for node in expand(nodes.strip()):
                    found.setdefault(node, []).append(job)
        return found

    def fail(self, nodes: Mapping[str, str]) -> None:
        """Set nodes down, so that Slurm requeues their jobs, and then power them down.

        ``nodes`` maps nodes to reasons.
        """
        for node, why in nodes.items():
            reason = f"{REASON}: {why}"[:200].replace("\n", " ")
            self._update(f"nodename={node}", "state=DOWN", f"reason={reason}")
            self._update(f"nodename={node}", "state=POWER_DOWN")

    def power_down(self, nodes: Iterable[str], *, at_once: bool) -> None:
        """Power down nodes when their jobs have ended; ``at_once`` requeues the jobs instead."""
        state = "POWER_DOWN_FORCE" if at_once else "POWER_DOWN_ASAP"
        for node in nodes:
            self._update(f"nodename={node}", f"state={state}")

    def drain(self, node: str, why: str) -> None:
        """Drain a node."""
        self._update(f"nodename={node}", "state=DRAIN", f"reason={REASON}: {why}"[:200])

    def undrain(self, node: str) -> None:
        """Return a node to service."""
        self._update(f"nodename={node}", "state=RESUME")

    def address(self, node: str, address: str) -> None:
        """Set the address of a node's machine in Slurm, because DNS may not know the node."""
        self._update(f"nodename={node}", f"nodeaddr={address}")

    def pause(self, shape: str, nodes: Iterable[str], seconds: float) -> None:
        """Keep jobs off these nodes for some time, so that Slurm does not start the nodes.

        Creates a reservation, which Slurm itself ends.
        """
        self.unpause(shape)
        minutes = max(1, round(seconds / 60))
        self._run(
            "scontrol", "create", "reservation", f"reservationname={REASON}-{shape}",
            "starttime=now", f"duration={minutes}", f"nodes={','.join(nodes)}", "users=root",
            "flags=maint,ignore_jobs",
        )  # fmt: skip

    def unpause(self, shape: str) -> None:
        """Remove a shape's reservation. Idempotent."""
        try:
            self._run("scontrol", "delete", f"reservationname={REASON}-{shape}")
        except HostFault as error:
            if "not found" not in str(error).lower() and "invalid" not in str(error).lower():
                raise

    def _update(self, *words: str) -> None:
        self._run("scontrol", "update", *words)

    def _run(self, tool: str, *words: str) -> str:
        program = f"{self._settings.bindir}/{tool}" if self._settings.bindir else tool
        conf = f"SLURM_CONF={self._settings.slurm_conf}"
        return run_tool("env", conf, program, *words, timeout=self._settings.timeout)


def _words(line: str) -> dict[str, str]:
    """Return the ``Key=Value`` pairs of a scontrol line. Reason is last, and contains spaces."""
    head, _, reason = line.partition(" Reason=")
    found = dict(re.findall(r"(?:^|\s)(\w+)=(\S*)", head))
    if reason:
        found["Reason"] = reason.partition(" [")[0].strip()
    return found


def _node(name: str, said: Mapping[str, str], jobs: tuple[str, ...]) -> PoolNode:
    flags = set(said.get("State", "").rstrip("*").replace("*", "").split("+"))
    return PoolNode(
        name,
        _state(flags),
        said.get("Reason", ""),
        jobs,
        _time(said.get("LastBusyTime", "")),
        _time(said.get("SlurmdStartTime", "")),
    )


def _state(flags: set[str]) -> State:
    for wanted, state in _STATES:
        if wanted & flags:
            return state
    return "free"


_STATES: tuple[tuple[set[str], State], ...] = (
    ({"DOWN", "FAIL", "ERROR", "FUTURE", "UNKNOWN"}, "unusable"),
    ({"POWERING_DOWN", "POWER_DOWN"}, "deleting"),
    ({"POWERING_UP", "POWER_UP"}, "building"),
    ({"POWERED_DOWN"}, "off"),
    ({"DRAIN", "DRAINING", "DRAINED"}, "draining"),
    ({"ALLOCATED", "MIXED", "COMPLETING"}, "busy"),
)


def _time(text: str) -> float:
    """Return the Unix time of a local time that Slurm printed, or 0 for other text."""
    try:
        return time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S"))
    except (ValueError, OverflowError):
        return 0.0
