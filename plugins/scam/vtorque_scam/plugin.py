"""``-vm scam=true``: protect guests from cache side channels, as ``[plugin.scam]`` configures."""

from __future__ import annotations

from collections.abc import Iterator

from vtorque_core.api import Extra, JobRequest, Option, boolean, constant_hook, hookimpl
from vtorque_core.api.vm_options import VCPUS, VMS_PER_NODE, show_boolean

SCAM = Option(
    "scam", boolean, False, "protect the guests from cache side channels", "BOOL", show_boolean,
    needs_root=bool,
)  # fmt: skip
vtorque_options = constant_hook(SCAM)


@hookimpl
def vtorque_needs(request: JobRequest) -> Iterator[Extra]:
    """Request one more CPU per guest with an odd number of vCPUs, to complete an SMT core."""
    if request[SCAM]:
        yield Extra(cpus=request[VMS_PER_NODE] * (request[VCPUS] % 2), own=True)
