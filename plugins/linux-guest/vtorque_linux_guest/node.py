"""What the Linux guest plugin does on the node: settings, resources, health checks."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from pathlib import Path

from vtorque_core.api import HostFault, always
from vtorque_core.api.health import HealthCheck, HealthResult
from vtorque_core.api.node_job import Site
from vtorque_linux_guest.boot.seed import Seed
from vtorque_linux_guest.settings import Settings, site_scripts

vtorque_settings = always(Settings)
vtorque_resources = always(Seed)


def agent_check(site: Site) -> Iterator[HealthResult]:
    """Say whether images without a built-in agent can be used on this node."""
    path = Path(site[Settings].agent.replace("{arch}", platform.machine()))
    try:
        with path.open("rb") as file:
            start = file.read(4)
    except OSError as error:
        yield HealthResult(
            "warning",
            f"{path}: {error.strerror}: only images with a built-in agent can be used",
            fix="build it: python3 -m vtorque_linux_guest.agent.build PATH; or set agent in "
            "[plugin.linux-guest]",
        )
        return
    if start != b"\x7fELF":
        yield HealthResult(
            "failed", f"{path} is not a program", fix="set agent in [plugin.linux-guest]"
        )
        return
    yield HealthResult("ok", f"agent for images without one: {path}")


def scripts_check(site: Site) -> Iterator[HealthResult]:
    """Say which of the admin's scripts run in guests, and whether they are safe to run."""
    settings = site[Settings]
    for what, directory in (("prologue", settings.prologue), ("epilogue", settings.epilogue)):
        try:
            found = site_scripts(directory)
        except HostFault as error:
            yield HealthResult("failed", str(error), fix=f"chown root: and chmod go-w {directory}")
            continue
        names = ", ".join(script.name for script in found) or "none"
        yield HealthResult("ok", f"guest {what} scripts: {names}")


vtorque_health_checks = always(
    HealthCheck("linux guest agent", agent_check), HealthCheck("linux guest scripts", scripts_check)
)
