"""Call libvirt with a time limit. As root, or as the owner of a personal site.

Every call raises HostFault if libvirt fails or does not answer in time. libvirt may still complete
the call later.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from vtorque_core.base.errors import HostFault
from vtorque_core.base.hypervisor import LOOKUP as LOOKUP
from vtorque_core.base.hypervisor import STAGE as STAGE
from vtorque_core.base.hypervisor import call as call
from vtorque_core.base.hypervisor import destroy_domain as destroy_domain
from vtorque_core.base.hypervisor import domain_runs as domain_runs
from vtorque_core.base.hypervisor import if_exists as if_exists
from vtorque_core.base.hypervisor import library as library
from vtorque_core.base.hypervisor import network_xml as network_xml
from vtorque_core.base.hypervisor import on_domain as on_domain
from vtorque_core.base.hypervisor import resume_domain as resume_domain
from vtorque_core.base.hypervisor import suspend_domain as suspend_domain
from vtorque_core.base.hypervisor import versions as versions

T = TypeVar("T")

ANSWER = 5.0
"""Seconds for a call that needs an answer from QEMU."""
_STUCK = 1000  # milliseconds without answer after which QEMU counts as hanging


def ask_qemu(uri: str, uuid: str, what: str, work: Callable[[Any], T]) -> T | None:
    """Return ``work(domain)``, or None if the domain has ended. Raises HostFault if QEMU hangs.

    QEMU hangs if guest root makes it wait for a daemon that the user has stopped. Other functions
    of this module would occupy one of libvirtd's workers until QEMU answers.
    """

    def unless_stuck(domain: Any) -> tuple[T] | tuple[()]:
        state, _details, waiting = domain.controlInfo(0)  # state 0: no call waits for QEMU
        return () if state and waiting > _STUCK else (work(domain),)

    found = on_domain(uri, uuid, what, unless_stuck, ANSWER)
    if found is None:
        return None
    if not found:
        raise HostFault(f"{what}: QEMU does not answer libvirt", stage=STAGE)
    return found[0]
