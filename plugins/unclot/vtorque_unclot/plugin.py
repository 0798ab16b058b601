"""``-vm unclot=true,unclot_shmem=64M``: memory shared by the job's guests on a node.

``[options.unclot_shmem]`` limits the size.
"""

from __future__ import annotations

from collections.abc import Iterator

from vtorque_core.api import (
    Extra,
    JobRequest,
    Option,
    Refusal,
    boolean,
    constant_hook,
    hookimpl,
    show_mib,
    size_mib,
)
from vtorque_core.api.vm_options import show_boolean


def power_of_two_mib(value: str) -> int:
    """Parse a size such as ``64M`` and return MiB. Raises ValueError unless it is a power of two.

    PCI devices can only have memory of such a size (PCI Local Bus Specification 3.0, 6.2.5.1).
    """
    mib = size_mib(value)
    if mib & (mib - 1):
        below = 1 << (mib.bit_length() - 1)
        fits = f"{show_mib(below)} or {show_mib(2 * below)}"
        raise ValueError(f"is not a power of two: request {fits}")
    return mib


UNCLOT = Option(
    "unclot", boolean, False, "memory shared by the job's guests on a node", "BOOL", show_boolean,
    forbids=frozenset({"save", "migrate"}),
)  # fmt: skip
SHMEM = Option("unclot_shmem", power_of_two_mib, 64, "its size (a power of two)", "SIZE", show_mib)

vtorque_options = constant_hook(UNCLOT, SHMEM)


@hookimpl
def vtorque_parse_args(request: JobRequest) -> Iterator[Refusal]:
    """Refuse ``unclot_shmem=`` without ``unclot=true``."""
    if SHMEM.key in request.given and not request[UNCLOT]:
        size = SHMEM.show(request[SHMEM])
        fix = "add unclot=true, or leave out the size"
        yield Refusal("requires unclot=true", key=SHMEM.key, value=size, fix=fix)


@hookimpl
def vtorque_needs(request: JobRequest) -> Iterator[Extra]:
    """Request the shared memory in addition to the guests' memory."""
    if request[UNCLOT]:
        yield Extra(mib=request[SHMEM])
