"""``vsub --dry-run``: the plan and the virtual hardware of a request, with nothing submitted.

A front end has no topology of a node, so the placement, addresses and paths shown are examples.
"""

from __future__ import annotations

import dataclasses
import os
import pwd
import sys
from pathlib import Path

from vtorque_core import names, plan
from vtorque_core.api_batch import BatchJob
from vtorque_core.api_domain import Disk, Filesystem, Interface
from vtorque_core.api_node import GuestPlan, Placement, PoolClaim
from vtorque_core.cli.site import load
from vtorque_core.domain.merge import MergedDomain, merge
from vtorque_core.domain.render import DomainSpec, render
from vtorque_core.policy import decide
from vtorque_core.request import Request


def show(request: Request, config: Path) -> int:
    """Print what the node would make of the request; return the exit code. As the user.

    Raises Refused, HostFault as the node would.
    """
    site, plugins = load(config, node=True)
    wanted = decide(request, site, plugins)
    user = plan.job_user(pwd.getpwuid(os.getuid()).pw_name, site)
    host = os.uname().nodename
    job = BatchJob(id="0.example", owner=user.name, node=host, nodes=(host,), blob=b"")
    secret = bytes(32)
    planned = plan.plan_guests(job, wanted, site, plugins, user, secret)
    placed = []
    for notice in dict.fromkeys(notice for one in planned for notice in one.notices):
        sys.stderr.write(f"vsub: warning: {notice.text}\n")
    for one in planned:
        leased = {
            claim.pool: (claim.items[min(one.plan.index, len(claim.items) - 1)],)
            for claim in one.claims
            if isinstance(claim, PoolClaim) and claim.items
        }
        placement = Placement(memory_mib=one.plan.ram_mib, leased=leased)
        placed.append(dataclasses.replace(one.plan, placement=placement))
    sys.stdout.write("<!-- An example: placement, addresses and keys are the node's. -->\n")
    for key, option in sorted(plugins.options().items()):
        if wanted[option] not in ("", None):
            sys.stdout.write(f"<!-- {key} = {names.safe_name(option.show(wanted[option]))} -->\n")
    guests = plan.addressed(placed, job, site, secret)
    for guest, one in zip(guests, planned, strict=True):
        plan.context_of(guest, one.driver, site, plugins)
        merged = merge(plan.domain_contributions(guest, one.driver, site, plugins))
        sys.stdout.write(_example(guest, merged))
    return 0


def _example(guest: GuestPlan, merged: MergedDomain) -> str:
    """Return the domain with made-up names for what only a node starts: daemons and filters."""
    served = [*merged.aliases(Filesystem), *merged.aliases(Disk)]
    sockets = {alias: f"{alias}.sock" for alias in served}
    taps = {alias: f"tap-{alias[-8:]}" for alias in merged.aliases(Interface)}
    return render(DomainSpec(guest, "kvm"), merged, sockets=sockets, taps=taps)
