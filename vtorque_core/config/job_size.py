"""Compute the size of guests whose vCPUs or RAM follow the job's grant.

QEMU's memory, RAM disks and the needs of plugins are subtracted from the grant.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from vtorque_core.api import hooks
from vtorque_core.api.values import Extra, Image, JobRequest, Option
from vtorque_core.api.vm_options import JOB, MAX_VCPUS, RAM, UNLIMITED, VCPUS, VMS_PER_NODE
from vtorque_core.base.errors import Refusal, Refused, printable
from vtorque_core.base.sizes import show_mib
from vtorque_core.config.option_limits import Limits, nearest, refusal

if TYPE_CHECKING:
    from vtorque_core.config.plugins import Plugins
    from vtorque_core.config.site_config import Site


@dataclass(frozen=True)
class JobGrant:
    """Resources that the batch system granted to a job on a node; None: unlimited or unknown.

    ``mib`` includes QEMU's memory. ``reserved``: how many of ``cpus`` the site reserves for the
    host. Guests can share these CPUs, but not use them exclusively.
    """

    cpus: int | None = None
    mib: int | None = None
    reserved: int = 0


def resolve(
    asked: JobRequest,
    site: Site,
    plugins: Plugins,
    granted: JobGrant,
    image: Image | None = None,
    disk: int = 0,
) -> tuple[JobRequest, list[str], list[Refusal]]:
    """Replace ``vcpus=job`` and ``ram=job`` by numbers; return request, notes and refusals.

    Refusals include RAM that is too small for ``image``. ``disk``: MiB of a RAM disk.
    """
    of_job = [option for option in (VCPUS, RAM) if asked.values.get(option.key) == JOB]
    found = _set_sizes(asked, {option.key: _unlimited(option, site) for option in of_job})
    found = replace(found, of_job=asked.of_job | {option.key for option in of_job})
    notes, refusals = [], []
    for option in of_job:
        if option is VCPUS:
            whole = _vcpus(found, site, plugins, granted)
        else:
            whole = _ram(found, site, plugins, granted, disk)
        if whole is None:  # unlimited
            whole = found[option]
        limits = site.options.get(option.key, Limits())
        number = nearest(option, limits, whole)
        problem = refusal(option, limits, number, option.show(number), site.place)
        if problem is not None:
            refusals.append(problem)
        elif number != whole:
            by = [site.place(key) for name, key in limits.set_by.items() if name != "default"]
            notes.append(
                f"each guest gets {option.key}={option.show(number)} instead of "
                f"{option.show(whole)}, its share of the job (limit set by {' and '.join(by)})"
            )
        found = _set_sizes(found, {option.key: number})
    if image is not None and not refusals:
        refusals = _check_ram(found, site, plugins, granted, image, disk)
    return found, notes, refusals


def vcpus_on(request: JobRequest, site: Site, plugins: Plugins, cpus: int) -> int:
    whole = _vcpus(request, site, plugins, JobGrant(cpus))
    assert whole is not None  # noqa: S101 - a number is given
    return nearest(VCPUS, site.options.get(VCPUS.key, Limits()), whole)


def _check_ram(
    request: JobRequest, site: Site, plugins: Plugins, granted: JobGrant, image: Image, disk: int
) -> list[Refusal]:
    least = image.min_ram_mib
    if request[RAM] >= least:
        return []
    fix = f"ask for -vm ram={least}M or more"
    if RAM.key in request.of_job and granted.mib is not None:
        enough = _set_sizes(request, {RAM.key: least})
        need = total_memory(enough, site, extras(enough, site, plugins), disk)
        fix = f"ask the batch system for {show_mib(need)} of memory on each node, or for more"
    return [
        Refusal(
            f"image {image.name} needs more RAM",
            key=RAM.key,
            value=RAM.show(request[RAM]),
            limit=f"at least {least}M",
            where=f"image {image.name}",
            fix=fix,
        )
    ]


def total_memory(request: JobRequest, site: Site, more: Iterable[Extra], disk: int) -> int:
    """Return the MiB that all guests of a node need, with QEMU and ``more`` needs of plugins."""
    each = request[RAM] + site.node.qemu_overhead + disk
    return request[VMS_PER_NODE] * each + sum(e.mib for e in more)


def _unlimited(option: Option[Any], site: Site) -> int:
    limits = site.options.get(option.key, Limits())
    default = UNLIMITED[option.key] if limits.default in (None, JOB) else limits.default
    return nearest(option, limits, default)


def _vcpus(job: JobRequest, site: Site, plugins: Plugins, granted: JobGrant) -> int | None:
    if granted.cpus is None:
        return None
    count = job[VMS_PER_NODE]
    for number in range(min(granted.cpus // count, MAX_VCPUS), 1, -1):
        more = extras(_set_sizes(job, {VCPUS.key: number}), site, plugins)
        spare = sum(e.cpus for e in more) + granted.reserved * any(e.own for e in more)
        if count * number + spare <= granted.cpus:
            return number
    return 1


def _ram(job: JobRequest, site: Site, plugins: Plugins, granted: JobGrant, disk: int) -> int | None:
    if granted.mib is None:
        return None
    count = job[VMS_PER_NODE]
    more = extras(job, site, plugins)
    rest = granted.mib - total_memory(job, site, more, disk) + count * job[RAM]
    return max(1, rest // count // 2 * 2)


def extras(wanted: JobRequest, site: Site, plugins: Plugins) -> list[Extra]:
    """Return what plugins need on a node beside the guests' vCPUs and RAM."""
    found = []
    for contribution in plugins.each(hooks.vtorque_needs, request=wanted, site=site):
        if contribution.error is not None:
            raise Refused(contribution.failure("vtorque_needs"))
        plugin, item = contribution.origin, contribution.item
        if min(item.cpus, item.mib, *item.resources.values(), *item.licenses.values()) < 0:
            needs = printable(repr(item), 80)
            raise Refused(f"{plugin} returned a negative value in vtorque_needs: {needs}")
        found.append(item)
    return found


def _set_sizes(request: JobRequest, numbers: dict[str, int]) -> JobRequest:
    return replace(request, values=MappingProxyType({**request.values, **numbers}))
