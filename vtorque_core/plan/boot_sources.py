"""Choose and check the boot sources of a job's guests."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from vtorque_core.api import hooks
from vtorque_core.api.batch_system import BatchJob
from vtorque_core.api.boot_source import BootSource
from vtorque_core.api.guest_plan import GuestPlan, JobUser
from vtorque_core.api.values import Image, JobRequest
from vtorque_core.api.vm_options import VMS_PER_NODE
from vtorque_core.base import names
from vtorque_core.base.errors import HostFault, Refused
from vtorque_core.site.config import Site
from vtorque_core.site.plugins import Plugins


def offered(
    job: BatchJob,
    request: JobRequest,
    site: Site,
    plugins: Plugins,
    user: JobUser,
    image: Image,
) -> list[BootSource]:
    """Return the boot sources that a plugin offers before placement.

    Raises Refused unless their number is 0 or that of the guests.
    """
    sources = plugins.collect_from_one(
        hooks.vtorque_boot_sources, job=job, request=request, image=image, user=user, site=site
    )
    require_possible(sources)
    if sources and len(sources) != request[VMS_PER_NODE]:
        made = f"{len(sources)} guests were saved"
        raise Refused(f"is {request[VMS_PER_NODE]}, and {made}", key=VMS_PER_NODE.key)
    return sources


def require_possible(
    sources: Iterable[BootSource], *, adopts: bool = False, remote: bool = False
) -> None:
    """Raise HostFault for a source that may not be offered at this point.

    ``adopts``: sources may adopt a warm guest. ``remote``: sources must be remote.
    """
    for source in sources:
        what = ""
        if source.remote != remote:
            what = "does not come from another node" if remote else "comes from another node"
        elif source.remote and source.fallback:
            what = "comes from another node and has a fallback: the guest could run on both nodes"
        elif source.adopts and not adopts:
            what = "adopts a warm guest before the guests are rendered"
        if what:
            raise HostFault(f"boot source {source.name} {what}", stage="plan")


def with_source(plan: GuestPlan, source: BootSource, site_secret: bytes) -> GuestPlan:
    """Return the guest with a boot source and the identity that the source keeps."""
    plan = dataclasses.replace(plan, source=source)
    if (known := source.identity) is None:
        return plan
    return dataclasses.replace(
        plan,
        name=known.name,
        uuid=known.uuid,
        hostname=known.hostname,
        secret=names.derive(site_secret, "job", known.job_id, known.attempt),
    )
