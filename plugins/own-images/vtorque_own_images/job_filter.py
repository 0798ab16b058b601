"""Packet filter: a guest of a user's own image cannot reach NFS, metadata services, other jobs.

Used on sites with an administrator, not on personal sites. The rules and their reasons are in
``job_filter.nft``.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.resources import files
from ipaddress import IPv4Address, IPv4Network
from string import Template
from typing import ClassVar

from vtorque_core.api import run_tool
from vtorque_core.api.acquired import Resource, unjournalled

_REMOVAL = "table bridge {0}\ndelete table bridge {0}\n"


@dataclass(frozen=True)
class JobFilter(Resource):
    """The nftables table of the bridge family for one tap device.

    Attributes:
        gateway: the node's address in the network, or empty.
        own: addresses of the job's guests on this node.
        taps: tap devices of the job's guests on this node.
        subnets: the site's networks for guests.
    """

    kind: ClassVar[str] = "own-filter"
    needs_root: ClassVar[bool] = True
    tap: str
    gateway: str = unjournalled("")
    own: tuple[str, ...] = unjournalled(())
    taps: tuple[str, ...] = unjournalled(())
    subnets: tuple[str, ...] = unjournalled(())

    @property
    def _table(self) -> str:
        return f"{self.tap}-own"

    @property
    def script(self) -> str:
        """The nft script, which replaces an earlier table."""
        but = f" ip daddr != {IPv4Address(self.gateway)}" if self.gateway else ""
        subnets = (f"    ip daddr {IPv4Network(each)}{but} drop\n" for each in self.subnets)
        text = files("vtorque_own_images").joinpath("job_filter.nft").read_text("ascii")
        return Template(text).substitute(
            table=self._table,
            tap=self.tap,
            own=", ".join(str(IPv4Address(ip)) for ip in self.own),
            taps=", ".join(f'"{tap}"' for tap in self.taps),
            subnets="".join(subnets),
        )

    def create(self) -> None:
        """Load the filter in one transaction. Raises HostFault."""
        run_tool("nft", "-f", "-", stdin=self.script.encode())

    def release(self) -> None:
        """Delete the filter, if it exists. Raises HostFault."""
        run_tool("nft", "-f", "-", stdin=_REMOVAL.format(self._table).encode())
