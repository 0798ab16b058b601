"""The GUIDs by which an InfiniBand fabric identifies a guest's virtual function."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from vtorque_core.api import HostFault, run_tool
from vtorque_core.api.acquired import Resource
from vtorque_passthrough.pci_functions import VirtualFunction

NOBODY = ":".join(["00"] * 8)


@dataclass(frozen=True)
class VfGuid(Resource):
    """Node and port GUID of a virtual function (ip-link(8), "vf NUM node_guid").

    ``old`` holds the node GUID, port GUID and port state that release() restores.
    """

    kind: ClassVar[str] = "vrdma-guid"
    needs_root: ClassVar[bool] = True
    card: str
    number: int
    guid: str
    old: tuple[str, ...] = (NOBODY, NOBODY, "auto")

    @classmethod
    def for_function(cls, vf: VirtualFunction, guid: str) -> VfGuid:
        """Return the resource, with the current values in ``old``. Raises HostFault."""
        links = json.loads(run_tool("ip", "-json", "link", "show", "dev", vf.card))
        infos = [i for link in links for i in link.get("vfinfo_list", ()) if i["vf"] == vf.number]
        if not infos:
            raise HostFault(f"{vf.card} has no virtual function {vf.number}")
        keys = {"node guid": NOBODY, "port guid": NOBODY, "link_state": "auto"}
        old = tuple(str(infos[0].get(key, default)) for key, default in keys.items())
        return cls(vf.card, vf.number, guid, old)

    def create(self) -> None:
        """Set both GUIDs, and let the port follow the card's link state. Raises HostFault."""
        self._set(self.guid, self.guid, "auto")

    def release(self) -> None:
        """Restore the values in ``old``, if the card still exists. Raises HostFault."""
        if Path("/sys/class/net", self.card).exists():
            self._set(*self.old)

    def _set(self, *values: str) -> None:
        for word, value in zip(("node_guid", "port_guid", "state"), values, strict=True):
            vf = ("vf", str(self.number), word, value)
            run_tool("ip", "link", "set", "dev", self.card, *vf)
