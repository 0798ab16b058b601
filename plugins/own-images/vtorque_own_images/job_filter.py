"""Packet filter: a guest of a user's own image cannot reach NFS, metadata services, other jobs.

Used on sites with an administrator, not on personal sites. The rules and their reasons are in
``job_filter.nft``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib.resources import files
from ipaddress import IPv4Address, IPv4Network
from string import Template
from typing import ClassVar

from vtorque_core.api import HostFault, run_tool
from vtorque_core.api.acquired import Resource, unjournalled

_REMOVAL = "".join(
    f"table {family} {{0}}\ndelete table {family} {{0}}\n" for family in ("bridge", "inet")
)
# Let Linux compute the checksums that a guest has offloaded. nftables has no such statement;
# libvirt uses this rule, too.
_CHECKSUM = "PREROUTING -m mac --mac-source {} -j CHECKSUM --checksum-fill"


@dataclass(frozen=True)
class JobFilter(Resource):
    """The nftables tables and the iptables rule for one tap device.

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
        own = ", ".join(str(IPv4Address(ip)) for ip in self.own)
        return _template("job_filter").substitute(
            table=self._table,
            tap=self.tap,
            mac=self._mac,
            own=own,
            taps=", ".join(f'"{tap}"' for tap in self.taps),
            rules=_template("job_rules").substitute(own=own, subnets="".join(subnets)),
        )

    def create(self) -> None:
        """Load the filter. Raises HostFault."""
        run_tool("nft", "-f", "-", stdin=self.script.encode())
        self._remove_rule()
        self._change_rule("-A")

    def release(self) -> None:
        """Delete the filter, if it exists. Raises HostFault."""
        run_tool("nft", "-f", "-", stdin=_REMOVAL.format(self._table).encode())
        self._remove_rule()

    @property
    def _mac(self) -> str:
        return ":".join(re.findall("..", self.tap.removeprefix("vt")))

    def _remove_rule(self) -> None:
        try:
            self._change_rule("-C")
        except HostFault:  # no such rule
            return
        self._change_rule("-D")

    def _change_rule(self, command: str) -> None:
        rule = _CHECKSUM.format(self._mac).split()
        run_tool("iptables", "-w", "-t", "mangle", command, *rule)


def _template(name: str) -> Template:
    return Template(files("vtorque_own_images").joinpath(f"{name}.nft").read_text("ascii"))
