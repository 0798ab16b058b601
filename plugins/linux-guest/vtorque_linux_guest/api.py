"""Public, for other guest types whose guests run vtorque-agent: the host's side of its protocol.

What such a guest is made of, and how the agent gets into it, is the guest type's. How root waits
for it, and how its job runs, is :class:`AgentDriver`; doc/stream.md has the protocol.
"""

from vtorque_linux_guest.boot.seed import seed_disk, seed_file
from vtorque_linux_guest.guest.agent_side import agent_conf, home, ports
from vtorque_linux_guest.job.agent_driver import AgentDriver

__all__ = ["AgentDriver", "agent_conf", "home", "ports", "seed_disk", "seed_file"]
