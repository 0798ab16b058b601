"""``vsub --dry-run``: print plan and virtual hardware of a request without submitting it.

A submit host does not know the nodes, so placement, addresses and paths are examples.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from vtorque_core.api.batch_system import BatchJob
from vtorque_core.api.claims import Placement, PoolClaim
from vtorque_core.api.guest_plan import GuestPlan
from vtorque_core.api.libvirt_domain import Disk, Filesystem, Interface
from vtorque_core.base import kvm, names
from vtorque_core.config import personal
from vtorque_core.config.job_limits import Facts
from vtorque_core.config.job_size import JobGrant
from vtorque_core.config.load import load
from vtorque_core.config.policy import check_options, for_job
from vtorque_core.config.request import Request
from vtorque_core.config.site_config import Site
from vtorque_core.live.site_config import site_templates
from vtorque_core.node.start.guest_resources import domain_spec
from vtorque_core.plan import guests as plan
from vtorque_core.plan.domain.merge import MergedDomain
from vtorque_core.plan.domain.render import render
from vtorque_core.plan.job_context import JobContext, job_user


def show(request: Request, config: Path, granted: JobGrant, facts: Facts) -> int:
    site, plugins = for_job(*load(config, node=True), facts)
    wanted = check_options(request, site, plugins)
    user = job_user(personal.account().pw_name, site)
    host = os.uname().nodename
    job = BatchJob(id="0.example", owner=user.name, node=host, nodes=(host,), blob=b"")
    context = JobContext(job, user, site, plugins, bytes(32), granted=granted)
    planned = plan.plan_guests(context, wanted)
    wanted = planned[0].plan.request
    placements = []
    for notice in dict.fromkeys(notice for one in planned for notice in one.notices):
        sys.stderr.write(f"vsub: warning: {notice.text}\n")
    for one in planned:
        leased = {
            claim.pool: (claim.items[min(one.plan.index, len(claim.items) - 1)],)
            for claim in one.claims
            if isinstance(claim, PoolClaim) and claim.items
        }
        placements.append(Placement(memory_mib=one.plan.ram_mib, leased=leased))
    sys.stdout.write("<!-- An example: a node sets other placement, addresses and keys. -->\n")
    for key, option in sorted(plugins.options().items()):
        if wanted[option] not in ("", None):
            sys.stdout.write(f"<!-- {key} = {names.safe_name(option.show(wanted[option]))} -->\n")
    guests = plan.place_guests(context, planned, placements)
    for path, place in site_templates(site.templates).items():
        sys.stdout.write(f"<!-- {path} replaces {place or 'nothing'} -->\n")
    accel = _accelerator(site)
    for each in plan.prepare_guests(context, guests, planned):
        sys.stdout.write(_example(each.plan, each.merged, site, accel))
    return 0


def _accelerator(site: Site) -> kvm.Accel:
    if site.owner or site.paths.run.is_dir():
        return kvm.choose(site.node.accel, site.paths.run, site.node.qemu_user)
    return kvm.Accel("tcg" if site.node.accel == "tcg" else "kvm")


def _example(guest: GuestPlan, merged: MergedDomain, site: Site, accel: kvm.Accel) -> str:
    served = [*merged.aliases(Filesystem), *merged.aliases(Disk)]
    sockets = {alias: f"{alias}.sock" for alias in served}
    taps = {alias: f"tap-{alias[-8:]}" for alias in merged.aliases(Interface)}
    return render(domain_spec(guest, site, accel.type), merged, sockets=sockets, taps=taps)
