"""What makes OpenPBS call vTorque: for ``vtorque setup`` and ``vtorque doctor``. As root.

Hooks belong to the whole complex: the server sends them to its nodes. So the first node's setup
makes them and each later one finds them; an uninstall takes them away when the last node that has
vTorque's resource goes.
"""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vtorque_core.api import HostFault
from vtorque_core.api_node import Site
from vtorque_core.api_setup import Check, Installation, SetupStep, long_enough
from vtorque_pbs import hooks
from vtorque_pbs.node import PbsNode
from vtorque_pbs.settings import Settings
from vtorque_pbs.torque_setup import Marked, rights

BEGIN, END = "vtorque_begin", "vtorque_end"


def steps(
    node: PbsNode, site: Site, settings: Settings, place: Installation
) -> Sequence[SetupStep]:
    """Return the steps in order: what makes jobs come here is the last."""
    seconds = math.ceil(settings.epilogue_alarm)
    end = hooks.openpbs_end(place, site.paths.journal, site.paths.run / "proof", seconds - 10)
    where = node.home / "mom_priv"
    missing = f"{where} does not exist: if PBS_HOME is elsewhere, set [plugin.pbs] home"
    found: list[SetupStep] = [
        Check(f"find {where}", "" if where.is_dir() else missing),
        long_enough(
            "[plugin.pbs] epilogue_alarm", seconds, place.end_time + 20, "the end of a job"
        ),
        rights(node.commands),
        Hook(node, BEGIN, "execjob_begin", hooks.openpbs_begin(place), hooks.ALARM),
        Hook(node, END, "execjob_end", end, seconds),
    ]
    if settings.property:
        found += [Resource(node, settings.property), Marked(node, settings.property)]
    return found


@dataclass(frozen=True)
class Hook:
    """One hook of the server, for all nodes."""

    node: PbsNode
    name: str
    event: str
    content: bytes
    alarm: int

    @property
    def text(self) -> str:
        """Say which."""
        return f"import the hook {self.name} for {self.event}, alarm {self.alarm} s"

    def done(self) -> bool:
        """Return whether it is there as it should be. Raises HostFault."""
        found = self._found()
        wanted = {"event": self.event, "enabled": "true", "alarm": str(self.alarm)}
        if any(found.get(key) != value for key, value in wanted.items()):
            return False
        return self._ask("export hook", "application/x-python default") == self.content.decode()

    def apply(self) -> None:
        """Make it, or make it right. Raises HostFault."""
        if not self._found():
            self._tell(f"create hook {self.name}")
        self._tell(f"set hook {self.name} event = {self.event}")
        self._tell(f"set hook {self.name} alarm = {self.alarm}")
        with tempfile.TemporaryDirectory() as directory:  # root's alone, 0700
            file = Path(directory, "hook.py")
            file.write_bytes(self.content)
            self._tell(f"import hook {self.name} application/x-python default {file}")
        self._tell(f"set hook {self.name} enabled = true")

    def undo(self) -> None:
        """Delete it, unless other nodes still run VM jobs. Raises HostFault."""
        name, _ = self.node.this_node()
        others = [n for n, each in self.node.nodes().items() if n != name]
        marked = [n for n in others if self.node.is_marked(self.node.nodes()[n])]
        if self._found() and not marked:
            self._tell(f"delete hook {self.name}")

    def _found(self) -> Mapping[str, str]:
        answer = self.node.commands.ask("qmgr", "-c", f"list hook {self.name}")
        if answer.code:
            if "hook not found" in answer.err:
                return {}
            raise HostFault(f"qmgr ended with {answer.code}: {answer.words}")
        return dict(re.findall(r"^\s+(\w+) = (.*)$", answer.out, re.MULTILINE))

    def _tell(self, command: str) -> None:
        self.node.commands.tell("qmgr", "-c", command)

    def _ask(self, command: str, what: str) -> str:
        return self.node.commands.tell("qmgr", "-c", f"{command} {self.name} {what}")


@dataclass(frozen=True)
class Resource:
    """The boolean resource of the nodes that run VM jobs."""

    node: PbsNode
    name: str

    @property
    def text(self) -> str:
        """Say which."""
        return f"create the resource {self.name}, true on nodes that run VM jobs"

    def done(self) -> bool:
        """Return whether it is there. Raises HostFault."""
        answer = self.node.commands.ask("qmgr", "-c", f"list resource {self.name}")
        return answer.code == 0

    def apply(self) -> None:
        """Create it. Raises HostFault."""
        self.node.commands.tell("qmgr", "-c", f"create resource {self.name} type=boolean, flag=h")

    def undo(self) -> None:
        """Delete it, unless other nodes or jobs still have it: then the server does not."""
        if self.done():
            self.node.commands.ask("qmgr", "-c", f"delete resource {self.name}")
