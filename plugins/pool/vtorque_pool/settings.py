"""``[plugin.pool]``: which nodes may come, of what shape, from which cloud."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from vtorque_core.api import setting
from vtorque_pool.hostlist import expand


class _Nothing(dict[str, Any]):
    """An empty table as a default, which has to be hashable."""

    __hash__ = object.__hash__  # type: ignore[assignment]


@dataclass(frozen=True)
class Shape:
    """``[[plugin.pool.shapes]]``: nodes that are alike."""

    name: str = setting(doc="what it is called in messages and tags")
    nodes: str = setting(doc="names of its nodes, such as cloud[1-8]: so many at most")
    cloud: str = setting(doc="which of [plugin.pool.clouds] has its machines")
    image: str = setting("", doc="what they boot, in the cloud's words")
    flavor: str = setting("", doc="how large they are, in the cloud's words")
    cpus: int = setting(1, doc="CPUs of one, as the batch system counts them")
    memory: int = setting(2048, doc="memory of one for jobs", unit="MiB")
    features: tuple[str, ...] = setting((), doc="features (Slurm) or properties (Torque) of them")
    least: int = setting(0, doc="so many stay although they are idle")
    price: float = setting(0.0, doc="what one costs per hour, in the site's currency; 0: not said")
    user_data: str = setting(
        "", doc="file that cloud-init gets; @NODE@ and @CLUSTER@ in it are replaced. No secrets"
    )

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z][a-z0-9-]{0,30}", self.name, re.ASCII):
            raise ValueError(f"shape {self.name!r}: its name must be like small-1")
        if self.least < 0 or self.least > len(self.names):
            raise ValueError(
                f"shape {self.name}: least is {self.least}, its nodes are {self.nodes}"
            )
        if self.cpus < 1 or self.memory < 1 or self.price < 0:
            raise ValueError(f"shape {self.name}: cpus and memory begin at 1, price at 0")

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its nodes. Raises ValueError."""
        return expand(self.nodes)


@dataclass(frozen=True)
class Settings:
    """Settings in ``[plugin.pool]``."""

    cluster: str = setting("vtorque", doc="tag of all machines of this site's pool; no other's")
    shapes: tuple[Shape, ...] = setting((), doc="the nodes that may come, see doc/pool.md")
    clouds: Mapping[str, Mapping[str, str]] = setting(
        _Nothing(), doc="cloud to driver = static, libvirt, ec2, openstack, ... and what that needs"
    )
    batch: Literal["slurm", "torque", "openpbs"] = setting("slurm", doc="whose nodes they are")
    state: str = setting("/var/lib/vtorque-pool", doc="directory of what is held, paused, counted")
    log: str = setting("/var/log/vtorque-pool.log", doc="every decision with its reason")
    textfile: str = setting("", doc="file of metrics for node_exporter's textfile collector")
    slurm_conf: str = setting("/etc/slurm/slurm.conf", doc="Slurm: slurm.conf of this host")
    bindir: str = setting("", doc="directory of scontrol or qmgr; empty: /usr/sbin, /usr/bin")
    at_once: int = setting(10, doc="machines that are being made at the same time, at most")
    idle: float = setting(600.0, doc="an idle node leaves after", unit="s")
    ready: float = setting(900.0, doc="a machine that has not registered is ended after", unit="s")
    ending: float = setting(120.0, doc="a machine is gone, at the latest, after", unit="s")
    failures: int = setting(3, doc="failures of a shape, within pause, that pause it")
    pause: float = setting(1800.0, doc="how long no machine of such a shape is made", unit="s")
    interval: float = setting(15.0, doc="vtorque pool serve: time between two rounds", unit="s")
    timeout: float = setting(60.0, doc="one command of the batch system; clouds have one", unit="s")
    queues: Mapping[str, int] = setting(
        _Nothing(), doc="Torque, OpenPBS: queue to the nodes that its waiting jobs may bring"
    )
    accounts: Mapping[str, int] = setting(
        _Nothing(), doc="Torque, OpenPBS: the same by account (qsub -A); empty name: without one"
    )

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}", self.cluster, re.ASCII):
            raise ValueError(f"cluster is {self.cluster!r}, must be letters, digits, _ . -")
        seen: dict[str, str] = {}
        for shape in self.shapes:
            if shape.cloud not in self.clouds:
                raise ValueError(
                    f"shape {shape.name}: there is no [plugin.pool.clouds.{shape.cloud}]"
                )
            for name in shape.names:
                if name in seen:
                    raise ValueError(f"node {name} is of shape {seen[name]} and of {shape.name}")
                seen[name] = shape.name
        if len({shape.name for shape in self.shapes}) < len(self.shapes):
            raise ValueError("two shapes have the same name")
        for name, cloud in self.clouds.items():
            if not cloud.get("driver"):
                raise ValueError(f"[plugin.pool.clouds.{name}] names no driver")
        if self.at_once < 1 or self.failures < 1:
            raise ValueError("at_once and failures begin at 1")
        if min(self.idle, self.ready, self.ending, self.pause, self.interval, self.timeout) <= 0:
            raise ValueError("times must be over 0 s")

    def shape_of(self, node: str) -> Shape | None:
        """Return the shape that a node is of."""
        return next((shape for shape in self.shapes if node in shape.names), None)
