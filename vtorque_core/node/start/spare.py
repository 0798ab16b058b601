"""Claim a warm guest for a job, or end it to make room. As root.

A warm ("spare") guest is booted and paused before its job exists, and has its own journal. It has
free device slots, but no user, share, address or secret. A claim marks the guest's journal under
the node's lock, so only one job gets the guest.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from vtorque_core.api import hooks
from vtorque_core.api.boot_source import ColdBoot, Offer, RenderedGuest
from vtorque_core.api.guest_plan import GuestPlan
from vtorque_core.base import hypervisor, kvm
from vtorque_core.base.errors import HostFault, InUse, VtorqueError
from vtorque_core.base.locks import Busy, job_lock, node_lock
from vtorque_core.base.names import Paths
from vtorque_core.config.site_config import Site
from vtorque_core.node.end.teardown import end_spare, retire_spare
from vtorque_core.node.start.attempt import StartAttempt
from vtorque_core.node.start.guest_resources import domain_spec
from vtorque_core.plan import host_ids
from vtorque_core.plan.domain.render import render_base
from vtorque_core.plan.guests import GuestSpec, require_possible
from vtorque_core.records.journal import Journal
from vtorque_core.records.reading import DOMAIN, SPARE, JournalState, idle_spares, lock_name, walk
from vtorque_core.resources.lease import SpareUse

WAITS, TAKEN = SPARE, "taken"
"""Journal phases of a warm guest: jobs can claim it; a job has claimed it."""

_PATIENCE, _DESTROYED, _LOOK_AGAIN = 30.0, 10.0, 0.1  # seconds
_log = logging.getLogger(__name__)


def apply_offers(
    start: StartAttempt, prepared: Sequence[GuestSpec], evicted: Sequence[str]
) -> list[GuestSpec]:
    """Apply the boot sources that plugins offer to the guests; return all guests.

    If a source is a warm guest, claims that guest for the job. Ends the warm guests in ``evicted``
    (keys) that the job does not claim, because the job needs their memory.
    """
    paths, site = start.site.paths, start.site
    cold = [each for each in prepared if isinstance(each.plan.source, ColdBoot)]
    rendered = [RenderedGuest(each.plan, each.driver, partial(_base, each, site)) for each in cold]
    offers = start.plugins.collect_from_one(
        hooks.vtorque_rendered_sources, guests=rendered, site=site
    )
    _require_possible(offers, {each.plan.index for each in cold})
    # Prefer warm guests that would end anyway.
    offers.sort(key=lambda offer: offer.source.warm_key not in evicted)
    chosen = list(prepared)
    if offers:
        with node_lock(paths):
            free = {s.key: s for s in idle_spares(list(walk(paths))) if _is_waiting(s)}
            chosen = [_apply_offer(start, each, offers, free) for each in prepared]
    adopted = {each.plan.source.warm_key for each in chosen}
    for key in (key for key in evicted if key not in adopted):
        try:
            end_unclaimed(paths, key)
        except HostFault as error:
            raise InUse(f"cannot end warm guest {key}: {error}", stage="plan") from None
    return chosen


def _require_possible(offers: Sequence[Offer], indexes: Collection[int]) -> None:
    for offer in offers:
        if offer.index not in indexes:
            raise HostFault(
                f"boot source {offer.source.name} is offered for guest {offer.index}, which does "
                "not exist or already has a boot source",
                stage="plan",
            )
    require_possible([offer.source for offer in offers], adopts=True)


def _apply_offer(
    start: StartAttempt, each: GuestSpec, offers: Sequence[Offer], free: dict[str, JournalState]
) -> GuestSpec:
    guest, paths = each.plan, start.site.paths
    for source in [offer.source for offer in offers if offer.index == guest.index]:
        if guest.request.needs & source.forbids:
            continue
        if not source.warm_key:
            return replace(each, plan=replace(guest, source=source))
        warm = free.get(source.warm_key)
        if warm is None or not _uid_fits(warm, guest, start.site):
            continue
        del free[warm.key]
        start.acquire(SpareUse(warm.key), guest=guest)
        with Journal.open(paths, warm.path) as journal:
            journal.phase(TAKEN)
        _log.info("was booted before: %s", warm.key, extra={"guest": guest.index})
        return _adopt_identity(replace(each, plan=replace(guest, source=source)), warm, start.site)
    return each


def end_unclaimed(paths: Paths, key: str) -> bool:
    """End a warm guest and return True, or return False if a job has claimed it.

    A booting guest's domain is destroyed, which makes the process that boots it fail.
    """
    name = lock_name(paths.journal / f"{key}.jsonl")
    until = time.monotonic() + _PATIENCE
    with contextlib.ExitStack() as stack:
        while True:
            try:
                stack.enter_context(job_lock(paths, name, _LOOK_AGAIN))
                break
            except Busy:  # it still boots
                if time.monotonic() > until:
                    raise
            _stop(paths, key)
        if not retire_spare(paths, key):
            return False
        end_spare(paths, key)
    return True


def _stop(paths: Paths, key: str) -> None:
    with node_lock(paths):
        for record in (r for s in idle_spares(list(walk(paths))) if s.key == key for r in s.open):
            if record.kind == DOMAIN:
                uri, uuid = str(record.args["uri"]), str(record.args["uuid"])
                hypervisor.destroy_domain(uri, uuid, _DESTROYED)


def _is_waiting(state: JournalState) -> bool:
    return state.phase == WAITS and any(r.kind == DOMAIN for r in state.open)


def _base(each: GuestSpec, site: Site) -> str:
    accel = kvm.choose(site.node.accel, site.paths.run, site.node.qemu_user).type
    return render_base(domain_spec(each.plan, site, accel), each.merged)


def _uids(spare: JournalState) -> list[int]:
    return [int(r.args["item"]) for r in spare.leases if r.args["pool"] == host_ids.POOL]


def _uid_fits(spare: JournalState, guest: GuestPlan, site: Site) -> bool:
    uids, first = _uids(spare), site.node.guest_uids
    inside = bool(uids) and first > 0 and uids[0] in range(first, first + host_ids.COUNT)
    return inside if guest.leased_items(host_ids.POOL) else not uids


def _adopt_identity(each: GuestSpec, spare: JournalState, site: Site) -> GuestSpec:
    (domain,) = (r for r in spare.open if r.kind == DOMAIN)
    uids = _uids(spare)
    uid = uids[0] if uids else hypervisor.qemu_uid(site.node.qemu_user)
    name, uuid = str(domain.args["name"]), str(domain.args["uuid"])
    return replace(each, plan=replace(each.plan, name=name, uuid=uuid, qemu_uid=uid))


def main(state: str, run: str, key: str) -> int:
    try:
        gone = end_unclaimed(Paths(Path(state), Path(run)), key)
    except VtorqueError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write("ended\n" if gone else "taken\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
