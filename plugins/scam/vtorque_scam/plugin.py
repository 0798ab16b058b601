"""``-vm scam=true``: protect the guests from cache side channels. How far: ``[plugin.scam]``."""

from __future__ import annotations

from collections.abc import Iterator

from vtorque_core.api import Extra, JobRequest, Option, always, boolean, hookimpl
from vtorque_core.api.vm_options import VCPUS, VMS_PER_NODE, show_boolean

SCAM = Option(
    "scam", boolean, False, "protect the guests from cache side channels", "BOOL", show_boolean,
    needs_root=bool,
)  # fmt: skip
vtorque_options = always(SCAM)


@hookimpl
def vtorque_needs(request: JobRequest) -> Iterator[Extra]:
    """Ask for whole cores: the sibling of an odd vCPU stays idle where cores have two threads."""
    if request[SCAM]:
        yield Extra(cpus=request[VMS_PER_NODE] * (request[VCPUS] % 2), own=True)
