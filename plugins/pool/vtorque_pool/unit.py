"""The systemd unit of ``vtorque pool serve`` (systemd.service(5))."""

from __future__ import annotations

from vtorque_admin.steps import ReplacedFile, systemd_unit, unit_line
from vtorque_core.api.setup_steps import Installation

_TEXT = """[Unit]
Description=vTorque worker nodes on demand
After=network-online.target

[Service]
Type=exec
User={user}
ExecStart={serve}
Restart=on-failure
RestartSec=10s

[Install]
WantedBy=multi-user.target
"""


def steps(place: Installation, user: str) -> list[ReplacedFile]:
    """Return the step that writes the unit, or an empty list if systemd does not run."""
    serve = unit_line((*place.command, "pool", "serve", "--config", str(place.config)))
    return systemd_unit("vtorque-pool.service", _TEXT.format(user=user, serve=serve))
