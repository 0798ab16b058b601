"""Create and delete the pool's machines, in all its clouds.

Each machine has tags in its cloud, which name the pool and the node. A process holds a node's lock
while it creates or deletes the node's machine, and first lists the machines with the pool's tag.
Therefore a repeated call creates no second machine, and finds a machine that a killed process left.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from vtorque_core.api import Busy, HostFault, name_errors, take_lock
from vtorque_pool.api import CloudFault, Driver, Machine, MachineOrder, StockOut
from vtorque_pool.memory import StateFile
from vtorque_pool.settings import MachineShape, Settings

Log = Callable[[str], None]


@dataclass(frozen=True)
class CloudState:
    """The machines of all clouds.

    ``silent`` has the error of each cloud that did not answer. ``clouds`` maps machine ids to
    clouds.
    """

    machines: tuple[Machine, ...]
    silent: Mapping[str, str]
    clouds: Mapping[str, str] = field(default_factory=dict)

    def machines_of(self, node: str) -> list[Machine]:
        """Return a node's live machines, oldest first. The pool keeps only the oldest."""
        mine = [m for m in self.machines if m.node == node and m.is_live]
        return sorted(mine, key=lambda m: (m.created, m.id))


def failures(answers: Mapping[str, Machine | HostFault]) -> dict[str, str]:
    """Return the errors of :meth:`Machines.make` by node, without nodes that are locked."""
    return {
        node: str(answer)
        for node, answer in answers.items()
        if isinstance(answer, HostFault) and not isinstance(answer, Busy)
    }


class Machines:
    """The machines of a site's pool. ``drivers`` has one driver for each cloud."""

    def __init__(self, settings: Settings, drivers: Mapping[str, Driver], log: Log) -> None:
        self.settings = settings
        self.memory = StateFile(Path(settings.state), log)
        self._drivers = drivers
        self.log = log

    def list_machines(self, clouds: Collection[str] | None = None) -> CloudState:
        """List the machines of these clouds (default: all).

        Each machine is listed once, even if two clouds share an account, or if a cloud's answer
        repeats the machine.
        """
        machines: dict[str, tuple[Machine, str]] = {}
        silent = {}
        for name in self._drivers if clouds is None else clouds:
            try:
                for each in self._drivers[name].machines(self.settings.cluster):
                    machines.setdefault(each.id, (each, name))
            except HostFault as error:
                silent[name] = str(error)
        of_cloud = {id_: name for id_, (_, name) in machines.items()}
        return CloudState(tuple(each for each, _ in machines.values()), silent, of_cloud)

    def make(self, nodes: Iterable[str], why: str) -> dict[str, Machine | HostFault]:
        """Ensure that each node has one machine; return the machine or the error, by node."""
        wanted = list(dict.fromkeys(nodes))
        answers: dict[str, Machine | HostFault] = {}
        with self._lock_nodes(wanted) as (mine, theirs):
            for node in theirs:
                answers[node] = Busy(f"another process creates or deletes the machine of {node}")
                self.log(
                    f"{node}: not created ({why}): another process creates or deletes its machine"
                )
            for cloud, names in self._group_by_cloud(mine, answers).items():
                answers.update(self._create_machines(cloud, names, why))
        return answers

    def _group_by_cloud(
        self, nodes: Iterable[str], answers: dict[str, Machine | HostFault]
    ) -> dict[str, list[str]]:
        now = time.time()
        remembered = self.memory.read()
        clouds: dict[str, list[str]] = {}
        for node in nodes:
            shape = self.settings.shape_of(node)
            if shape is None:
                answers[node] = HostFault(f"{node} belongs to no shape of [plugin.pool]")
            elif remembered.is_paused(shape.name, now):
                reason = remembered.why.get(shape.name, "")
                answers[node] = StockOut(f"{shape.name} is paused: {reason}")
            else:
                clouds.setdefault(shape.cloud, []).append(node)
        return clouds

    def _create_machines(
        self, cloud: str, nodes: list[str], why: str
    ) -> dict[str, Machine | HostFault]:
        """Create the nodes' missing machines in a cloud, and delete surplus machines.

        Lists the cloud's machines before and after these changes.
        """
        driver = self._drivers[cloud]
        before = self.list_machines([cloud])
        if before.silent:
            return {node: CloudFault(before.silent[cloud]) for node in nodes}
        answers: dict[str, Machine | HostFault] = {}
        missing = []
        for node in nodes:
            if there := before.machines_of(node):
                answers[node] = there[0]
                self.log(f"{node}: already has the machine {there[0].id} ({why})")
            else:
                missing.append(node)
        room = len(missing)
        if missing:
            with contextlib.suppress(CloudFault):
                left = driver.quota()
                room = room if left is None else min(room, left)
        for node in missing[room:]:
            answers[node] = StockOut(f"the quota of {cloud} is used up")
        with ThreadPoolExecutor(self.settings.max_creating) as threads:
            work = {n: threads.submit(self._create, driver, n, why) for n in missing[:room]}
            answers.update({node: each.result() for node, each in work.items()})
        after = self.list_machines([cloud]) if room else before
        for node in nodes:
            there = after.machines_of(node)
            if isinstance(answers[node], CloudFault) and there:
                self.log(
                    f"{node}: the machine {there[0].id} was created although the cloud "
                    f"reported: {answers[node]}"
                )
            if there:
                answers[node] = there[0]
            for extra in there[1:]:
                self._destroy(driver, extra, "the node has another machine")
        return answers

    def _create(self, driver: Driver, node: str, why: str) -> Machine | HostFault:
        shape = self.settings.shape_of(node)
        if shape is None:
            return HostFault(f"{node} belongs to no shape of [plugin.pool]")
        try:
            machine = driver.create(self._order(shape, node))
        except HostFault as error:
            self.log(f"{node}: no machine: {error}")
            return error
        with self.memory.edit() as remembered:
            remembered.shape_counters(shape.name).starts += 1
        self.log(f"{node}: created {machine.id} ({why})")
        return machine

    def _order(self, shape: MachineShape, node: str) -> MachineOrder:
        content = b""
        if shape.user_data:
            with name_errors(shape.user_data):
                content = Path(shape.user_data).read_bytes()
            content = content.replace(b"@NODE@", node.encode())
            content = content.replace(b"@CLUSTER@", self.settings.cluster.encode())
        cluster = self.settings.cluster
        return MachineOrder(
            cluster, node, shape.name, shape.image, shape.flavor, shape.cpus, shape.memory, content
        )

    def end(
        self,
        nodes: Iterable[str],
        why: str,
        *,
        even_held: bool = False,
        still: Callable[[], Collection[str]] | None = None,
    ) -> dict[str, str]:
        """Delete all machines of these nodes; return the errors by node.

        Nodes under ``vtorque pool hold`` keep their machines, unless ``even_held`` is true.
        ``still`` is called after the nodes are locked, and returns the nodes whose machines must
        still be deleted.
        """
        wanted = list(dict.fromkeys(nodes))
        failed: dict[str, str] = {}
        held = {} if even_held else self.memory.read().held
        with self._lock_nodes(wanted) as (mine, theirs):
            failed.update(dict.fromkeys(theirs, "another process creates or deletes its machine"))
            for node in [node for node in mine if node in held]:
                self.log(f"{node}: kept, because it is held: {held[node]}")
            found = (
                self.list_machines()
            )  # in all clouds: the site may have moved a shape to another cloud
            ours = [node for node in mine if node not in held]
            now = still() if still and ours else ours
            for node in ours:
                shape = self.settings.shape_of(node)
                if shape is None:
                    failed[node] = "belongs to no shape of [plugin.pool]"
                elif shape.cloud in found.silent:
                    failed[node] = found.silent[shape.cloud]
                elif node not in now:
                    failed[node] = f"no longer true: {why}"
                else:
                    failed.update(self._end_node(node, found, why))
        for node, problem in failed.items():
            self.log(f"{node}: not deleted: {problem}")
        return failed

    def _end_node(self, node: str, found: CloudState, why: str) -> dict[str, str]:
        for machine in [m for m in found.machines if m.node == node and m.state != "deleting"]:
            if problem := self._destroy(self._drivers[found.clouds[machine.id]], machine, why):
                return {node: problem}
        return {}

    def end_machine(self, machine: Machine, why: str) -> str:
        """Delete one machine, in whichever cloud it is; return the error, or an empty string."""
        for name, driver in self._drivers.items():
            with contextlib.suppress(CloudFault):
                if any(m.id == machine.id for m in driver.machines(self.settings.cluster)):
                    return self._destroy(driver, machine, why)
            self.log(f"{machine.id} does not exist in {name}, or {name} did not answer")
        return ""

    def _destroy(self, driver: Driver, machine: Machine, why: str) -> str:
        try:
            driver.destroy(machine.id)
        except HostFault as error:
            return str(error)
        self.log(f"{machine.node or 'no node'}: ended {machine.id} ({why})")
        return ""

    def count_failures(self, nodes: Mapping[str, str]) -> dict[str, str]:
        """Count a failure of these nodes, once for each shape.

        ``nodes`` maps nodes to reasons. Returns the newly paused shapes with the reasons.
        """
        paused = {}
        shapes = {self.settings.shape_of(node): why for node, why in nodes.items()}
        with self.memory.edit() as remembered:
            for shape, why in shapes.items():  # several nodes of a shape are one failure
                if shape is None or remembered.is_paused(shape.name, time.time()):
                    continue
                most, pause = self.settings.max_failures, self.settings.failure_backoff
                if remembered.fail(shape.name, why, time.time(), most, pause):
                    paused[shape.name] = why
        for name, why in paused.items():
            text = f"{name}: paused for {self.settings.failure_backoff:g} s after failures"
            self.log(f"{text}: {why}. To retry at once: vtorque pool release {name}")
        return paused

    @contextlib.contextmanager
    def _lock_nodes(self, nodes: list[str]) -> Iterator[tuple[list[str], list[str]]]:
        """Lock the nodes; yield the locked nodes, and the nodes that other processes hold."""
        held: list[int] = []
        mine, theirs = [], []
        end = time.monotonic() + self.settings.timeout
        try:
            for node in sorted(nodes):
                path = self.memory.directory / "nodes" / node
                try:
                    held.append(take_lock(path, max(0.0, end - time.monotonic())))
                    mine.append(node)
                except Busy:
                    theirs.append(node)
            yield mine, theirs
        finally:
            for descriptor in held:
                os.close(descriptor)

    def is_busy(self, node: str) -> bool:
        """Return True if a process is creating or deleting a node's machine."""
        try:
            os.close(take_lock(self.memory.directory / "nodes" / node, 0))
        except Busy:
            return True
        return False
