"""The three ``-vm`` options of the pinning plugin. ``vsub`` imports this module."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from vtorque_core.api import (
    BOOLEAN_WORDS,
    Extra,
    FileData,
    JobRequest,
    Option,
    Refusal,
    boolean,
    constant_hook,
    hookimpl,
    setting,
    show_mib,
    size_mib,
)
from vtorque_core.api.vm_options import RAM, VCPUS, VMS_PER_NODE

if TYPE_CHECKING:
    from vtorque_core.api.node_job import Site

Numa = Literal["", "preferred", "strict"]  # "": the site's [node] numa


def page_size(value: str) -> bool | int:
    """Return a huge page size in KiB, True if the node chooses the size, or False for none.

    Raises ValueError.
    """
    if value.strip().lower() in BOOLEAN_WORDS:
        return boolean(value)
    problem = "is not a size of huge pages: write true, false, or a size like 2M or 1G"
    try:
        mib = size_mib(value)
    except ValueError:
        raise ValueError(problem) from None
    if mib & (mib - 1):  # huge page sizes are powers of two
        raise ValueError(problem)
    return mib * 1024


def numa_mode(value: str) -> Numa:
    """Parse ``preferred`` or ``strict``. Raises ValueError."""
    match value.strip().lower():
        case "preferred":
            return "preferred"
        case "strict":
            return "strict"
    raise ValueError("is invalid: write preferred or strict")


def _show_pinning(value: bool | FileData) -> str:
    return value.name if isinstance(value, FileData) else str(value).lower()


def _show_pages(value: bool | int) -> str:
    return str(value).lower() if isinstance(value, bool) else show_mib(value // 1024)


VCPU_PINNING: Option[bool | FileData] = Option(
    "vcpu_pinning",
    boolean,
    False,
    "pin each vCPU to its own host CPU, or to the CPUs in your file",
    "BOOL|FILE",
    _show_pinning,
    is_file=True,
    words=BOOLEAN_WORDS,
)
HUGEPAGES: Option[bool | int] = Option(
    "hugepages", page_size, False, "memory of each guest in huge pages", "BOOL|SIZE", _show_pages,
    needs_root=bool,
)  # fmt: skip
NUMA: Option[Numa] = Option(
    "numa", numa_mode, "", "memory on the NUMA node of the CPUs: preferred or strict", "MODE"
)


@dataclass(frozen=True)
class Settings:
    """Settings in ``[plugin.pinning]``."""

    user_files: bool = setting(True, doc="let users submit a file that names host CPUs")
    required: bool = setting(
        True,
        doc="refuse a job on a node without enough huge pages; false: run it without, "
        "with a warning",
    )
    emulator_cpu: bool = setting(
        True,
        doc="reserve one more CPU on each node of a job with pinned guests, for QEMU's "
        "own threads; false: they share the vCPUs' CPUs unless the job has a spare "
        "one",
    )
    advisor: Literal["ledger", "numad"] = setting(
        "ledger",
        doc="advisor that proposes a NUMA node: the ledger, or numad, whose advice is "
        "optional and takes 2 s",
    )


vtorque_settings = constant_hook(Settings)
vtorque_options = constant_hook(VCPU_PINNING, HUGEPAGES, NUMA)


@hookimpl
def vtorque_parse_args(request: JobRequest, site: Site) -> Iterator[Refusal]:
    """Refuse an invalid vCPU mapping, and RAM that is not a multiple of the page size."""
    mapping, page = request[VCPU_PINNING], request[HUGEPAGES]
    if isinstance(mapping, FileData):
        if not site[Settings].user_files:
            yield Refusal(
                "files that name host CPUs are not allowed on this site",
                key=VCPU_PINNING.key,
                value=mapping.name,
                limit="true, false",
                where="[plugin.pinning] user_files",
            )
        from vtorque_pinning.mapping import read  # noqa: PLC0415 - not by every vsub

        try:
            read(mapping.content, request[VMS_PER_NODE], request[VCPUS])
        except ValueError as error:
            fix = "write one line of host CPUs for each guest of a node, with one CPU for each vCPU"
            yield Refusal(str(error), key=VCPU_PINNING.key, value=mapping.name, fix=fix)
    if not isinstance(page, bool) and request[RAM] * 1024 % page:
        yield Refusal(
            "the guest's RAM is not a multiple of this page size",
            key=HUGEPAGES.key,
            value=HUGEPAGES.show(page),
            limit=f"ram={RAM.show(request[RAM])}",
            fix=f"request a multiple of {HUGEPAGES.show(page)}, or smaller pages",
        )


@hookimpl
def vtorque_needs(request: JobRequest, site: Site) -> Iterator[Extra]:
    """Request a CPU for the emulator threads of pinned guests if ``emulator_cpu`` is set."""
    if request[VCPU_PINNING]:
        yield Extra(cpus=int(site[Settings].emulator_cpu), own=True)
