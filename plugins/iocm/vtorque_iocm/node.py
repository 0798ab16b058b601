"""I/O cores on the node: claims, iothreads, NIC queues, and the manager process."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from vtorque_core.api import Refusal, constant_hook, hookimpl, name_errors, setting
from vtorque_core.api.claims import Claim, CoreClaim, Notice
from vtorque_core.api.guest_plan import GuestPlan, report_missing
from vtorque_core.api.libvirt_domain import Element, IoThreads, NetQueues
from vtorque_core.api.node_job import NodeJob, Site
from vtorque_core.live.node_process import NodeProcess
from vtorque_iocm import irqs
from vtorque_iocm.plugin import IOCM, MAX_CORES, MIN_CORES

QUEUES = 8  # per NIC, at most: each costs memory and interrupts


@dataclass(frozen=True)
class Settings:
    """Settings in ``[plugin.iocm]``."""

    enabled: bool = setting(True, doc="nodes provide I/O cores")
    nodes: str = setting(
        ".*", doc="regular expression of the names of the nodes that provide I/O cores"
    )
    required: bool = setting(
        True, doc="refuse a job on a node without I/O cores; false: run it without"
    )
    max_cores: int = setting(4, doc="maximum number of I/O cores of a guest")
    interval: float = setting(1.0, doc="time between two measurements of the load", unit="s")
    busy_threshold: float = setting(
        0.8, doc="load per I/O core above which a guest gets one more, 0 to 1"
    )
    interfaces: tuple[str, ...] = setting(
        (), doc="host NICs whose interrupts are moved to I/O cores"
    )

    def __post_init__(self) -> None:
        if not 0 < self.busy_threshold <= 1 or self.interval <= 0:
            raise ValueError(
                "busy_threshold must be more than 0 and at most 1; interval must be more than 0"
            )
        with name_errors("nodes is not a regular expression", re.error, fault=ValueError):
            re.compile(self.nodes)


class ManagerProcess(NodeProcess):
    """The I/O manager process, one for all jobs of the node (:mod:`vtorque_iocm.manager`)."""

    kind = "iocm-manager"
    name = "iocm-manager"
    module = "vtorque_iocm.manager"


vtorque_settings = constant_hook(Settings)
vtorque_resources = constant_hook(ManagerProcess, irqs.IrqAffinity)


@hookimpl
def vtorque_plan(guest: GuestPlan, site: Site) -> Iterator[Claim | Refusal | Notice]:
    """Claim the guest's minimum of I/O cores. The manager may lease more while the guest runs."""
    if not guest[IOCM]:
        return
    settings = site[Settings]
    least, most = guest[MIN_CORES], guest[MAX_CORES] or settings.max_cores
    for key, value in ((MIN_CORES.key, least), (MAX_CORES.key, most)):
        if value > settings.max_cores:
            limit, where = str(settings.max_cores), "[plugin.iocm] max_cores"
            yield Refusal("is more than allowed", key, str(value), limit, where)
    if guest.host.nodes and (what := _missing_support(guest, settings)):
        required, where, fix = settings.required, "[plugin.iocm] required", f"leave out {IOCM.key}"
        yield report_missing(guest, what, option=IOCM, required=required, where=where, fix=fix)
        return
    yield CoreClaim("io", least, True, max(least, most), key=MIN_CORES.key)


def _missing_support(guest: GuestPlan, settings: Settings) -> str:
    if not settings.enabled:
        return "I/O cores ([plugin.iocm] enabled = false)"
    if not re.fullmatch(settings.nodes, guest.job.node):
        return f"I/O cores (its name does not match [plugin.iocm] nodes = {settings.nodes!r})"
    return "second CPU for I/O" if len(guest.host.cpus) < 2 else ""


@hookimpl
def vtorque_render_domain(guest: GuestPlan, site: Site) -> Iterator[Element]:
    """Give the guest one iothread per possible I/O core, and NICs with several queue pairs."""
    if _has_io_cores(guest):
        yield IoThreads(guest.placement.most.get("io", len(guest.placement.cores["io"])))
        if guest.vcpus > 1:
            yield NetQueues(min(guest.vcpus, QUEUES))


@hookimpl
def vtorque_post_boot(job: NodeJob) -> None:
    """Save the IRQ affinities and start the manager, unless another job of the node has done so."""
    settings, paths = job.site[Settings], job.site.paths
    if any(_has_io_cores(guest) for guest in job.guests):
        files = irqs.affinity_files(settings.interfaces)
        needs = [job.acquire(irqs.IrqAffinity(irqs.memo(paths), files))] if files else []
        job.acquire(
            ManagerProcess.for_node(paths, settings.interval, settings.busy_threshold), needs=needs
        )


def _has_io_cores(guest: GuestPlan) -> bool:
    return guest[IOCM] and "io" in guest.placement.own
