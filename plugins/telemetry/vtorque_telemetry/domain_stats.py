"""Read the counters of all running domains from libvirt. As root."""

from __future__ import annotations

from typing import Any

from vtorque_core.live.libvirt import call

_STATS = 1 << 2 | 1 << 3 | 1 << 4 | 1 << 5  # balloon, vCPUs, interfaces, blocks
_ACTIVE = 1 << 0  # virConnectGetAllDomainStatsFlags
_NOWAIT = 1 << 29  # do not wait for a domain on which another libvirt job runs


def domain_stats(uri: str, timeout: float = 1.0) -> dict[str, dict[str, Any]]:
    """Return the vCPU, balloon, interface and block statistics of all running domains, by UUID.

    Names and values are those of ``virsh domstats``. A domain on which another libvirt job runs has
    fewer values. Raises HostFault if libvirt does not answer within ``timeout`` seconds.
    """

    def work(connection: Any) -> dict[str, dict[str, Any]]:
        found = connection.getAllDomainStats(_STATS, _ACTIVE | _NOWAIT)
        return {domain.UUIDString(): stats for domain, stats in found}

    return call(uri, "counters of all guests", work, timeout)
