"""The settings ``[plugin.pool]``: nodes, shapes and clouds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from vtorque_core.api import setting
from vtorque_pool.hostlist import expand


class _EmptyTable(dict[str, Any]):
    """An empty table that is hashable, as dataclasses require of default values."""

    __hash__ = object.__hash__  # type: ignore[assignment]


@dataclass(frozen=True)
class MachineShape:
    """A table ``[[plugin.pool.shapes]]``: one kind of node, with its cloud, image and size."""

    name: str = setting(doc="name of the shape in messages and tags")
    nodes: str = setting(
        doc="names of the nodes, such as cloud[1-8]; their number is the maximum number of machines"
    )
    cloud: str = setting(doc="the entry of [plugin.pool.clouds] that provides the machines")
    image: str = setting("", doc="image that the machines boot, as the cloud names it")
    flavor: str = setting("", doc="machine size, as the cloud names it")
    cpus: int = setting(1, doc="CPUs of a machine, as the batch system counts them")
    memory: int = setting(2048, doc="memory of a machine that jobs can use", unit="MiB")
    features: tuple[str, ...] = setting((), doc="Slurm features or Torque properties of the nodes")
    min_nodes: int = setting(0, doc="number of nodes that are kept when idle")
    price: float = setting(
        0.0, doc="price of a machine per hour, in the site's currency; 0: unknown"
    )
    user_data: str = setting(
        "",
        doc="file passed to cloud-init; @NODE@ and @CLUSTER@ are replaced. Users can "
        "read it: no secrets",
    )

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9-]{0,30}", self.name, re.ASCII):
            raise ValueError(f"shape {self.name!r}: the name is invalid: write it like small-1")
        if self.min_nodes < 0 or self.min_nodes > len(self.names):
            raise ValueError(
                f"shape {self.name}: min_nodes={self.min_nodes} is more than the number of its "
                f"nodes {self.nodes}"
            )
        if self.cpus < 1 or self.memory < 1 or self.price < 0:
            raise ValueError(
                f"shape {self.name}: cpus={self.cpus} and memory={self.memory} must be at "
                f"least 1, and price={self.price:g} at least 0"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the shape's nodes."""
        return expand(self.nodes)


@dataclass(frozen=True)
class Settings:
    """Settings in ``[plugin.pool]``."""

    cluster: str = setting(
        "vtorque", doc="tag of all machines of this pool; must be unique among the pools of a cloud"
    )
    shapes: tuple[MachineShape, ...] = setting(
        (), doc="kinds of nodes that can be created, see doc/pool.md"
    )
    clouds: Mapping[str, Mapping[str, str]] = setting(
        _EmptyTable(),
        doc="for each cloud: driver = static, libvirt, ec2 or openstack, and the "
        "settings of that driver",
    )
    batch: Literal["slurm", "torque", "openpbs"] = setting(
        "slurm", doc="batch system that the nodes join"
    )
    state: str = setting(
        "/var/lib/vtorque-pool",
        doc="directory of the pool's state: holds, paused shapes, failure counts",
    )
    log: str = setting("/var/log/vtorque-pool.log", doc="log file: each decision with its reason")
    textfile: str = setting("", doc="file of metrics for node_exporter's textfile collector")
    slurm_conf: str = setting("/etc/slurm/slurm.conf", doc="Slurm: slurm.conf of this host")
    bindir: str = setting("", doc="directory of scontrol or qmgr; empty: /usr/sbin, /usr/bin")
    max_creating: int = setting(
        10, doc="maximum number of machines that are created at the same time"
    )
    idle_timeout: float = setting(600.0, doc="delete a node that was idle for this time", unit="s")
    boot_timeout: float = setting(
        900.0, doc="delete a machine that has not registered within this time", unit="s"
    )
    delete_timeout: float = setting(120.0, doc="maximum time for deleting a machine", unit="s")
    max_failures: int = setting(
        3, doc="pause a shape after this many failures within failure_backoff"
    )
    failure_backoff: float = setting(
        1800.0, doc="how long a shape is paused after failures", unit="s"
    )
    interval: float = setting(15.0, doc="vtorque pool serve: time between two rounds", unit="s")
    timeout: float = setting(
        60.0, doc="limit of one command of the batch system; clouds have their own", unit="s"
    )
    queues: Mapping[str, int] = setting(
        _EmptyTable(),
        doc="Torque, OpenPBS: for each queue, the maximum number of nodes created for "
        "its waiting jobs",
    )
    accounts: Mapping[str, int] = setting(
        _EmptyTable(),
        doc='Torque, OpenPBS: the same for each account (qsub -A); "" is for jobs without account',
    )

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}", self.cluster, re.ASCII):
            raise ValueError(f"cluster={self.cluster!r} is invalid: use letters, digits, _ . -")
        seen: dict[str, str] = {}
        for shape in self.shapes:
            if shape.cloud not in self.clouds:
                raise ValueError(
                    f"shape {shape.name}: [plugin.pool.clouds.{shape.cloud}] is missing"
                )
            for name in shape.names:
                if name in seen:
                    raise ValueError(
                        f"node {name} belongs to two shapes, {seen[name]} and {shape.name}"
                    )
                seen[name] = shape.name
        if len({shape.name for shape in self.shapes}) < len(self.shapes):
            raise ValueError("two shapes have the same name")
        for name, cloud in self.clouds.items():
            if not cloud.get("driver"):
                raise ValueError(f"[plugin.pool.clouds.{name}] has no driver")
        if self.max_creating < 1 or self.max_failures < 1:
            raise ValueError(
                f"max_creating={self.max_creating} and max_failures={self.max_failures} must be at "
                "least 1"
            )
        for name in ("idle", "boot", "delete"):
            if (seconds := getattr(self, f"{name}_timeout")) <= 0:
                raise ValueError(f"{name}_timeout={seconds:g} must be more than 0 s")
        if min(self.failure_backoff, self.interval, self.timeout) <= 0:
            raise ValueError("failure_backoff, interval and timeout must be more than 0 s")

    def shape_of(self, node: str) -> MachineShape | None:
        """Return the shape that lists a node, or None if the node is not in the pool."""
        return next((shape for shape in self.shapes if node in shape.names), None)
