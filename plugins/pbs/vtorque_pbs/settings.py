"""``[plugin.pbs]``: site settings for Torque and OpenPBS."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from vtorque_core.api import setting


@dataclass(frozen=True)
class Settings:
    """``[plugin.pbs]``."""

    bindir: str = setting("", doc="directory of qsub, qstat, qmgr, pbsnodes; empty: search PATH")
    home: str = setting(
        "",
        doc="PBS_HOME of the nodes; empty: /var/spool/torque (Torque) or /var/spool/pbs (OpenPBS)",
    )
    property: str = setting(
        "vtorque",
        doc="node property (Torque) or boolean resource (OpenPBS) that VM jobs request; "
        "empty: none",
    )
    exclusive: str = setting(
        "",
        doc="-l value that VM jobs add to get exclusive nodes: place=excl (OpenPBS), "
        "naccesspolicy=singleuser (Torque with Moab or Maui)",
    )
    node: str = setting("", doc="this node's name in the batch system; empty: the host name")
    prologue_alarm: float = setting(
        600.0,
        doc="Torque: minimum of $prologalarm; at least [node] teardown_timeout plus 70 s "
        "(60 s for the site's own epilogue, 10 s that pbs_mom subtracts); more for a "
        "slow server",
        unit="s",
    )
    epilogue_alarm: float = setting(
        120.0,
        doc="OpenPBS: alarm of the execjob_end hook; at least [node] teardown_timeout and 20 s",
        unit="s",
    )
    ssh: bool = setting(
        False,
        doc="users can log in to their jobs' nodes by ssh without a password; vmgr on a "
        "submit host then uses ssh (plugin login)",
    )
    submit_filter: bool = setting(
        False, doc="Torque: plain qsub submits scripts with #VSUB -vm lines as VM jobs"
    )
    vm_queues: tuple[str, ...] = setting(
        (),
        doc="OpenPBS: plain jobs of these queues, or that request this boolean resource, become "
        "VM jobs; NAME, or NAME:KEY=VALUE,... with -vm properties",
    )
    attempts: int = setting(3, doc="number of failed starts after which a job is held")

    def __post_init__(self) -> None:
        for name in ("bindir", "home"):
            value = getattr(self, name)
            if value and not Path(value).is_absolute():
                raise ValueError(
                    f"{name}={value!r} is invalid: write an absolute path, or leave it empty"
                )
        if self.property and not (self.property.isascii() and self.property.isidentifier()):
            raise ValueError(f"property={self.property!r} is invalid: use letters, digits and _")
        if self.exclusive and not re.fullmatch(r"(place|naccesspolicy)=[a-z]+", self.exclusive):
            raise ValueError(
                f"exclusive={self.exclusive!r} is invalid: write place=excl, "
                "naccesspolicy=singleuser, or a similar value"
            )
        if self.attempts < 1:
            raise ValueError(f"attempts={self.attempts} is too small: write 1 or more")
