"""``[plugin.pbs]``: what a site says about Torque or OpenPBS."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from vtorque_core.api import setting


@dataclass(frozen=True)
class Settings:
    """``[plugin.pbs]``."""

    bin: str = setting("", doc="directory of qsub, qstat, qmgr, pbsnodes; empty: search PATH")
    home: str = setting(
        "", doc="the nodes' PBS_HOME; empty: /var/spool/torque or /var/spool/pbs, by system"
    )
    property: str = setting(
        "vtorque",
        doc="Torque: node property, OpenPBS: boolean resource, of the nodes that run VM jobs; "
        "empty: VM jobs ask for none",
    )
    exclusive: str = setting(
        "",
        doc="what VM jobs ask for, as -l takes it, to have nodes alone: OpenPBS: place=excl; "
        "Torque with Moab or Maui: naccesspolicy=singleuser",
    )
    node: str = setting("", doc="this node's name in the batch system; empty: the host name")
    prologue_alarm: float = setting(
        600.0,
        doc="Torque: the smallest $prologalarm; at least [node] teardown_timeout plus 70 s for the "
        "site's own epilogue and the 10 s that pbs_mom subtracts; more for a slow server",
        unit="s",
    )
    epilogue_alarm: float = setting(
        120.0,
        doc="OpenPBS: alarm of the execjob_end hook; at least teardown_timeout and 20 s",
        unit="s",
    )
    ssh: bool = setting(
        False,
        doc="users reach their jobs' nodes by ssh without a password: on submit hosts vmgr logs, "
        "ssh, ... then go that way (plugin login)",
    )
    attempts: int = setting(
        3, doc="starts of a job that nodes could not provide its guests for, before it is held"
    )

    def __post_init__(self) -> None:
        """Refuse what could not be used. Raises ValueError."""
        for name in ("bin", "home"):
            value = getattr(self, name)
            if value and not Path(value).is_absolute():
                raise ValueError(f"{name} is {value!r}: write an absolute path, or nothing")
        if self.property and not (self.property.isascii() and self.property.isidentifier()):
            raise ValueError(f"property is {self.property!r}: write letters, digits and _")
        if self.exclusive and not re.fullmatch(r"(place|naccesspolicy)=[a-z]+", self.exclusive):
            raise ValueError(
                f"exclusive is {self.exclusive!r}: write place=excl, naccesspolicy=singleuser, or "
                "the like"
            )
        if self.attempts < 1:
            raise ValueError(f"attempts is {self.attempts}: the least is 1")
