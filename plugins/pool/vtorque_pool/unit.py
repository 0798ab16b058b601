"""``vtorque pool serve`` as a unit of systemd (systemd.service(5))."""

from __future__ import annotations

import shlex
from pathlib import Path

from vtorque_core.api.setup_steps import MARK, Installation, ReplacedFile

BOOTED = Path("/run/systemd/system")  # sd_booted(3)
PATH = Path("/etc/systemd/system/vtorque-pool.service")
_TEXT = """# Written by {mark}. To run it: systemctl daemon-reload; systemctl enable --now {name}
[Unit]
Description=vTorque's worker nodes that come and go
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


def steps(
    place: Installation, user: str, path: Path = PATH, booted: Path = BOOTED
) -> list[ReplacedFile]:
    """Return the step that writes it; none on a machine that systemd does not run."""
    if not booted.is_dir():
        return []
    argv = (*place.command, "pool", "serve", "--config", str(place.config))
    serve = shlex.join(argv).replace("%", "%%").replace("$", "$$")
    text = _TEXT.format(mark=MARK.decode(), name=path.name, user=user, serve=serve)
    return [ReplacedFile(path, text.encode(), mode=0o644)]
