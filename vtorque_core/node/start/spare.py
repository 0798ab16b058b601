"""Spare guests: one that is booted already, and waits, becomes a guest of a job.

A spare guest has a journal of its own, of no job (``JobHeader.spare``); who keeps such guests, and
how many, is a plugin's business. It is paused, has no user, share, address or secret, and room for
devices. A job takes one by a record in its own journal. It matches if its domain and the job's are
one but for what can be plugged in: both are rendered and compared. Neither has cores of its own,
and the job asks for nothing that could not be done to it (``Option.needs``).

As root in the prologue. Without spare guests nothing here costs anything.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from vtorque_core.api.guest_driver import SpareDriver
from vtorque_core.api.guest_plan import GuestPlan
from vtorque_core.api.libvirt_domain import Channel
from vtorque_core.api.values import Act
from vtorque_core.base import hypervisor, kvm
from vtorque_core.base.errors import HostFault, InUse, VtorqueError
from vtorque_core.base.locks import Busy, job_lock, node_lock
from vtorque_core.base.names import Paths
from vtorque_core.node.end.teardown import end_spare, retired
from vtorque_core.node.start.attempt import Start
from vtorque_core.node.start.guest_resources import daemons, domain_spec, root_disks
from vtorque_core.plan import guest_uids
from vtorque_core.plan.domain.render import NAMESPACE, base, plugged, render
from vtorque_core.plan.guests import Prepared
from vtorque_core.records.journal import Journal
from vtorque_core.records.reading import (
    DOMAIN,
    SPARE,
    JournalState,
    lock_name,
    read,
    spares,
    walk,
)
from vtorque_core.resources.lease import SpareUse
from vtorque_core.site.config import Site

PREFIX = "spare-"
"""Of the ids of spare guests' journals."""

WAITS, TAKEN = SPARE, "taken"
"""Phases: it may be taken from now on; it is a job's, and never waits again."""

BASE = "base.xml"
"""In its state directory: what a job's domain is compared with."""

FORBIDS: frozenset[Act] = frozenset({"save"})
"""What cannot be done to a guest that was booted before its job."""

_PATIENCE, _DESTROYED, _LOOK_AGAIN = 30.0, 10.0, 0.1  # seconds
_log = logging.getLogger(__name__)


def take(start: Start, prepared: Sequence[Prepared], gone: Sequence[str]) -> list[Prepared]:
    """Return the guests, with the names of the spare guests that become them, if some match.

    Those in ``gone``, whose memory the job has been given, end now unless they are taken. Raises
    InUse if one does not end.
    """
    paths, site = start.site.paths, start.site
    if not any(paths.journal.glob(f"{PREFIX}*")):
        return list(prepared)
    accel = kvm.choose(site.node.accel, paths.run, site.node.qemu_user).type
    wanted = [_base(each, site, accel) for each in prepared]
    found = []
    with node_lock(paths):
        free = [s for s in spares(list(walk(paths))) if _waits(s)]
        free.sort(key=lambda s: s.key not in gone)
        for each, xml in zip(prepared, wanted, strict=True):
            fit = (s for s in free if xml and _uid_fits(s, each.plan, site))
            spare = next((s for s in fit if xml == _base_of(s, paths)), None)
            if spare is not None:
                free.remove(spare)
                start.acquire(SpareUse(spare.key), guest=each.plan)
                with Journal.open(paths, spare.path) as journal:
                    journal.phase(TAKEN)
                _log.info("was booted before: %s", spare.key, extra={"guest": each.plan.index})
            found.append(each if spare is None else _become(each, spare, site))
    taken = {each.plan.spare for each in found}
    for key in gone:
        if key not in taken:
            _make_room(paths, key)
    return found


def _make_room(paths: Paths, key: str) -> None:
    """End a spare guest for a job. Raises InUse: by what others do, so the node is not to blame."""
    try:
        end_unless_taken(paths, key)
    except HostFault as error:
        raise InUse(f"spare guest {key} has not ended: {error}", stage="plan") from None


def end_unless_taken(paths: Paths, key: str) -> bool:
    """End a spare guest, also one that is being booted; return whether no job had it.

    Waits for whoever boots it, which fails when its domain is gone. Raises HostFault.
    """
    name = lock_name(paths.journal / f"{key}.jsonl")
    until = time.monotonic() + _PATIENCE
    with contextlib.ExitStack() as stack:
        while True:
            try:
                stack.enter_context(job_lock(paths, name, _LOOK_AGAIN))
                break
            except Busy:  # it is being booted
                if time.monotonic() > until:
                    raise
            _stop(paths, key)
        if not retired(paths, key):
            return False
        end_spare(paths, key)
    return True


def _stop(paths: Paths, key: str) -> None:
    """Have the domain of a spare guest that is being booted go, unless a job has it.

    Under the node's lock, so that no job takes it meanwhile.
    """
    with node_lock(paths):
        for record in (r for s in spares(list(walk(paths))) if s.key == key for r in s.open):
            if record.kind == DOMAIN:
                uri, uuid = str(record.args["uri"]), str(record.args["uuid"])
                hypervisor.destroy_domain(uri, uuid, _DESTROYED)


def _waits(state: JournalState) -> bool:
    return state.phase == WAITS and any(r.kind == DOMAIN for r in state.open)


def _base(each: Prepared, site: Site, accel: Literal["kvm", "tcg"]) -> str:
    able = isinstance(each.driver, SpareDriver) and not each.plan.request.needs & FORBIDS
    if not able or each.plan.placement.own:
        return ""
    return base(domain_spec(each.plan, site, accel), each.merged, site.templates)


def _base_of(state: JournalState, paths: Paths) -> str:
    try:
        return (paths.job_state(state.key) / "g0" / BASE).read_text(encoding="utf-8")
    except OSError:
        return ""


def _uids(spare: JournalState) -> list[int]:
    return [int(r.args["item"]) for r in spare.leases if r.args["pool"] == guest_uids.POOL]


def _uid_fits(spare: JournalState, guest: GuestPlan, site: Site) -> bool:
    """Return whether it runs as such a uid as the guest would: of the site's range, if of any."""
    uids, first = _uids(spare), site.node.guest_uids
    inside = bool(uids) and first > 0 and uids[0] in range(first, first + guest_uids.COUNT)
    return inside if guest.leased(guest_uids.POOL) else not uids


def _become(each: Prepared, spare: JournalState, site: Site) -> Prepared:
    (domain,) = (r for r in spare.open if r.kind == DOMAIN)
    uids = _uids(spare)
    uid = uids[0] if uids else hypervisor.qemu_uid(site.node.qemu_user)
    name, uuid = str(domain.args["name"]), str(domain.args["uuid"])
    guest = replace(each.plan, name=name, uuid=uuid, qemu_uid=uid, spare=spare.key)
    return replace(each, plan=guest)


def become(
    each: Prepared, site: Site, accel: Literal["kvm", "tcg"], sockets: dict[str, str],
    taps: dict[str, str],
) -> hypervisor.Taken:  # fmt: skip
    """Bring what the spare guest has to where the job's is looked for; return what it then gets.

    Its sockets are renamed, which whoever listens there does not notice. Its console's log gets a
    second name: when virtlogd begins a new file (2 MiB), that one is the spare guest's.
    """
    guest = each.plan
    run, state = site.paths.job_run(guest.spare) / "g0", site.paths.job_state(guest.spare) / "g0"
    try:
        for channel in each.merged.lists(Channel):
            (run / Path(channel.path).relative_to(guest.run_dir)).rename(channel.path)
        os.link(state / "console.log", guest.state_dir / "console.log")
    except OSError as error:
        raise HostFault(f"spare guest {guest.spare}: {error}") from None
    at = guest.placement
    cpus = at.cores.get("vcpu", ()) or at.share
    of_job = domain_spec(guest, site, accel)
    devices = plugged(of_job, each.merged, sockets, taps, site.templates)
    whole = render(of_job, each.merged, sockets=sockets, taps=taps, overrides=site.templates)
    metadata = whole[whole.index("<vtorque:job") : whole.index("</metadata>")].strip()
    # libvirt gives what it gets the namespace itself, and has no second prefix for that
    plain = re.sub("(</?)vtorque:", r"\1", metadata).replace(f' xmlns:vtorque="{NAMESPACE}"', "", 1)
    host = max((cpu for cpu in guest.host.cpus), default=-1) + 1
    return hypervisor.Taken(devices, plain, "vtorque", NAMESPACE, cpus, host)


def cold(start: Start, each: Prepared) -> Prepared:
    """End the spare guest that would not do; return the guest, to be booted in its name."""
    hypervisor.destroy_domain(start.site.node.libvirt_uri, each.plan.uuid, 10.0)
    for record in read(start.journal.path).open:
        if record.kind == DOMAIN and record.guest == each.plan.index:
            start.journal.released(record.seq)
    each = replace(each, plan=replace(each.plan, spare=""))
    (each.plan.state_dir / "console.log").unlink(missing_ok=True)
    for resource in [*root_disks(each, start.site), *daemons(each)]:
        resource.release()  # a daemon ends with its QEMU
        start.acquire(resource, guest=each.plan)
    return each


def main(state: str, run: str, key: str) -> int:
    """End a spare guest, unless a job has it; say which of the two."""
    try:
        gone = end_unless_taken(Paths(Path(state), Path(run)), key)
    except VtorqueError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write("ended\n" if gone else "taken\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
