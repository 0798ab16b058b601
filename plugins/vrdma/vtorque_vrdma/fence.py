"""Isolate the Soft-RoCE traffic of a job: each guest gets a packet filter for RoCE v2.

The core's filter lets a guest send only from its own address. This filter lets a guest receive RoCE
packets only from guests of its job. The filter is on the node, so guest root cannot remove it.
"""

from __future__ import annotations

from dataclasses import dataclass
from ipaddress import IPv4Address
from typing import ClassVar

from vtorque_core.api import run_tool
from vtorque_core.api.acquired import Resource, unjournalled

ROCE = 4791  # UDP port of RoCE version 2 (IANA; InfiniBand Architecture, annex A17)
GROUP = "01:00:00:00:00:00"  # bit of broadcast and multicast MACs (IEEE 802)


@dataclass(frozen=True)
class Fence(Resource):
    """The nftables table (nft(8)) of one guest's network card.

    ``peers`` are the addresses that may send to the guest. ``mac`` identifies the table: a MAC is
    unique on the node, while networks may use the same IP addresses.
    """

    kind: ClassVar[str] = "vrdma-fence"
    needs_root: ClassVar[bool] = True
    mac: str
    ip: str = unjournalled("")
    peers: tuple[str, ...] = unjournalled(())

    @property
    def _removal(self) -> str:
        digits = bytes.fromhex(self.mac.replace(":", "")).hex()  # ValueError if not a MAC
        return f"table bridge vrdma-{digits}\ndelete table bridge vrdma-{digits}\n"

    def create(self) -> None:
        """Add the filter in one transaction. Raises HostFault if nft is missing or fails."""
        peers = ", ".join(str(IPv4Address(ip)) for ip in self.peers)
        table = self._removal.partition("\n")[0]  # "table" does nothing if it exists
        roce = f"ip daddr {IPv4Address(self.ip)} udp dport {ROCE}"
        drops = (
            f"ether daddr {self.mac} {roce} ip saddr != {{ {peers} }} drop; "
            f"ether daddr & {GROUP} == {GROUP} {roce} drop"  # Linux also accepts multicast
        )
        chain = f"type filter hook postrouting priority 0; policy accept; {drops}"
        script = f"{self._removal}{table} {{ chain guest {{ {chain}; }}; }}\n"
        run_tool("nft", "-f", "-", stdin=script.encode())

    def release(self) -> None:
        """Delete the filter, if it exists. Raises HostFault."""
        run_tool("nft", "-f", "-", stdin=self._removal.encode())
