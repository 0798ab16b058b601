"""The agent's program, unit and start script in a guest with systemd."""

from __future__ import annotations

from importlib.resources import files

AGENT = "/usr/lib/vtorque/vtorque-agent"
START = "/usr/lib/vtorque/vtorque-start"
UNIT = "/etc/systemd/system/vtorque-agent.service"


def start_script() -> str:
    """Return the script that copies the job's data from the seed and runs the agent."""
    return files("vtorque_linux_guest.guest").joinpath("vtorque-start").read_text("utf-8")


def agent_unit() -> str:
    """Return the systemd unit that runs :func:`start_script` (systemd.service(5))."""
    return files("vtorque_linux_guest.guest").joinpath("vtorque-agent.service").read_text("utf-8")
