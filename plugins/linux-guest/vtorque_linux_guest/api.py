"""Public API for guest types that use vtorque-agent: the host side of its protocol.

A guest type defines its guests and installs the agent in them. :class:`AgentDriver` waits as root
for a guest, and runs the guest's job as the user. For the protocol, see doc/stream.md.
"""

from vtorque_linux_guest.boot.hardware import seed_disk
from vtorque_linux_guest.boot.seed import seed_file
from vtorque_linux_guest.guest.agent_side import agent_conf, home, ports
from vtorque_linux_guest.job.agent_driver import AgentDriver

__all__ = ["AgentDriver", "agent_conf", "home", "ports", "seed_disk", "seed_file"]
