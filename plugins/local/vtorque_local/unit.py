"""systemd unit of the service (systemd.service(5), systemd.resource-control(5))."""

from __future__ import annotations

from collections.abc import Sequence

from vtorque_admin.steps import systemd_unit, unit_line
from vtorque_core.api.setup_steps import Installation, SetupStep

NAME = "vtorque-local.service"
_TEXT = """[Unit]
Description=vTorque's batch system of one machine
Documentation=man:systemd.service(5)
After=network.target libvirtd.service

[Service]
Type=exec
ExecStart={serve}
# It waits until the running jobs are torn down; queued ones stay queued.
ExecStop={stop}
TimeoutStopSec=30min
Restart=on-failure
# A cgroup for each job. The limits are for all of them together, so that the node stays reachable.
Delegate=yes
TasksMax=90%
MemoryMax=95%
# A job that runs out of memory is ended, not the service.
OOMPolicy=continue
LimitNOFILE=65536
# No more than this: prologues mount, filter packets and set devices, and jobs are of this unit.
ProtectClock=yes
ProtectKernelLogs=yes

[Install]
WantedBy=multi-user.target
"""


def steps(place: Installation) -> Sequence[SetupStep]:
    """Return the setup step that writes the systemd unit, if systemd is running."""
    return systemd_unit(NAME, text(place))


def text(place: Installation) -> str:
    """Return the content of the unit file."""
    serve, stop = (
        unit_line((*place.command, "local", *words, "--config", str(place.config)))
        for words in (("serve", "--foreground"), ("stop",))
    )
    return _TEXT.format(serve=serve, stop=stop)
