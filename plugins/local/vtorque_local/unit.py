"""The service as a unit of systemd (systemd.service(5), systemd.resource-control(5))."""

from __future__ import annotations

import shlex
from pathlib import Path

from vtorque_core.api.setup_steps import MARK, Installation, ReplacedFile

BOOTED = Path("/run/systemd/system")  # sd_booted(3)
PATH = Path("/etc/systemd/system/vtorque-local.service")
_TEXT = """# Written by {mark}. To run it: systemctl daemon-reload; systemctl enable --now {name}
[Unit]
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


def steps(place: Installation, path: Path = PATH, booted: Path = BOOTED) -> list[ReplacedFile]:
    """Return the step that writes it; none on a machine that systemd does not run."""
    if not booted.is_dir():
        return []
    return [ReplacedFile(path, _text(place, path.name).encode(), mode=0o644)]


def _text(place: Installation, name: str) -> str:
    serve, stop = (
        _line((*place.command, "local", *words, "--config", str(place.config)))
        for words in (("serve", "--foreground"), ("stop",))
    )
    return _TEXT.format(mark=MARK.decode(), name=name, serve=serve, stop=stop)


def _line(argv: tuple[str, ...]) -> str:
    """Return a command line of systemd's, in which % and $ have a meaning."""
    return shlex.join(argv).replace("%", "%%").replace("$", "$$")
