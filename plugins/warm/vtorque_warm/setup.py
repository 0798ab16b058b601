"""Start the service of warm guests at setup and at boot of a node."""

from __future__ import annotations

from collections.abc import Iterator

from vtorque_admin.steps import Change, systemd_unit, unit_line
from vtorque_core.api.node_job import Site
from vtorque_core.api.setup_steps import Installation, SetupStep
from vtorque_warm.process import WarmService, end_all, ensure

# Oneshot: the service outlives this unit, and a job may start the service, too.
_UNIT = """[Unit]
Description=vTorque warm guests
After=libvirtd.service network.target

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart={start}
ExecStop={stop}

[Install]
WantedBy=multi-user.target
"""


def steps(site: Site, place: Installation) -> Iterator[SetupStep]:
    """Return the steps that install the systemd unit and start the service."""
    yield from systemd_unit("vtorque-warm.service", unit(place))
    yield Change(
        "start the service of warm guests",
        is_applied=lambda: not WarmService.for_node(site.paths).is_lost(),
        apply=lambda: _start(site),
        undo=lambda: end_all(site.paths),
    )


def _start(site: Site) -> None:
    ensure(site.paths, site.path)


def unit(place: Installation) -> str:
    """Return the systemd unit that starts the service (systemd.service(5))."""
    lines = {word: unit_line((*place.call("warm"), word)) for word in ("start", "stop")}
    return _UNIT.format(**lines)
