"""Setup steps common to Torque and OpenPBS. Privileges: root."""

from __future__ import annotations

import re
import socket

from vtorque_admin.steps import Check, Mark
from vtorque_core.api import HostFault
from vtorque_pbs.batch_commands import Commands
from vtorque_pbs.node import PbsNode


def rights(commands: Commands) -> Check:
    """Check that root on this node is a manager, which may hold jobs and change nodes."""
    host = socket.gethostname()
    try:
        problem = "" if _is_manager(commands, host) else (
            f"root@{host} is not a manager of the batch system; on its server, run: qmgr -c 'set "
            f"server managers += root@{host}'"
        )  # fmt: skip
    except HostFault as error:
        problem = f"the batch system's server did not answer: {error}"
    return Check(f"find root@{host} among the server's managers", problem)


def _is_manager(commands: Commands, host: str) -> bool:
    said = commands.run_checked("qmgr", "-c", "list server")
    names = re.search(r"^\s*managers = (.*)$", said, re.MULTILINE)
    managers = {each.strip() for each in (names[1] if names else "").split(",")}
    server = re.search(r"^Server:? (\S+)", said, re.MULTILINE)
    short = host.partition(".")[0]
    mine = {f"root@{name}" for name in (host, short, socket.getfqdn(), "*")}
    return bool(mine & managers) or (server is not None and server[1] in (host, short))


def mark_step(node: PbsNode, feature: str) -> Mark:
    """Return the step that marks this node for VM jobs with ``feature``."""
    return Mark(
        f"set {feature} on this node, which VM jobs request",
        lambda: node.is_marked(node.this_node()[1]),
        lambda: node.mark(True, ""),
        node.unmark,
    )
