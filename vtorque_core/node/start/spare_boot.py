"""Program that boots one warm guest (:mod:`vtorque_core.node.start.spare`). As root.

    python -m vtorque_core.node.start.spare_boot CONFIG KEEPER PORTS KEY=VALUE ...

A process must hold the lock ``<run>/KEEPER.lock``. When the holder has ended, the reaper ends
the guest. PORTS is the number of hotplug slots, KEY=VALUE a ``-vm`` option. Prints the guest's key.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from vtorque_core.api.batch_system import BatchJob
from vtorque_core.api.claims import CoreClaim, MemoryClaim, PoolClaim, RamClaim
from vtorque_core.api.guest_driver import WarmDriver
from vtorque_core.api.guest_plan import GuestPlan, JobUser
from vtorque_core.api.job_files import File
from vtorque_core.api.unprivileged_parser import helper_process
from vtorque_core.api.vcpu_threads import process_of, threads
from vtorque_core.base import hypervisor, kvm
from vtorque_core.base.errors import Refused, VtorqueError
from vtorque_core.base.locks import job_lock
from vtorque_core.config import policy
from vtorque_core.config.load import load
from vtorque_core.config.plugins import Plugins
from vtorque_core.config.request import Request
from vtorque_core.config.site_config import Site
from vtorque_core.node.end.teardown import end_spare, retire_spare
from vtorque_core.node.start import spare
from vtorque_core.node.start.attempt import StartAttempt
from vtorque_core.node.start.boot import GuestBoot, boot_one
from vtorque_core.node.start.guest_resources import acquire_all, domain_spec
from vtorque_core.plan import guests as plan
from vtorque_core.plan import host_ids
from vtorque_core.plan.domain.merge import merge
from vtorque_core.plan.domain.render import drop_pluggable, render_base
from vtorque_core.plan.job_context import JobContext, attempt_of, whole_node
from vtorque_core.plan.placement import ledger
from vtorque_core.records.journal import Journal
from vtorque_core.records.reading import SPARE_PREFIX, SPARE_XML, JobHeader

_LOW = 19  # the nice value of a guest that nobody waits for (setpriority(2))
_SHARE = 64  # divisor of its CPU shares: the ratio of the weights of nice 0 and 19 (sched(7))
_NOBODY = JobUser("root", 0, 0, (("root", 0),), "/root", "/bin/sh")


def boot(site: Site, plugins: Plugins, keeper: str, ports: int, wanted: Mapping[str, str]) -> str:
    node = socket.gethostname()
    job = BatchJob(SPARE_PREFIX + secrets.token_hex(4), "root", node, (node,), b"")
    with job_lock(site.paths, job.id):
        header = JobHeader(attempt_of(job, _NOBODY), keeper, spare=keeper)
        try:
            with Journal.start(site.paths, header) as journal:
                until = time.monotonic() + site.node.start_timeout
                start = StartAttempt(header.job, _NOBODY, site, until, journal, plugins)
                _boot(start, job, wanted, ports)
        except BaseException:
            if retire_spare(site.paths, header.job.key):  # otherwise a job has claimed it
                end_spare(site.paths, header.job.key)
            raise
    return header.job.key


def _boot(start: StartAttempt, job: BatchJob, wanted: Mapping[str, str], ports: int) -> None:
    site, plugins = start.site, start.plugins
    start.enter("plan")
    request = policy.check_options(Request(tuple(wanted.items())), site, plugins)
    share = replace(whole_node(site), exclusive=False)
    unshared = replace(site, shares={})
    context = JobContext(job, start.user, unshared, plugins, b"-" * 32, share.machine)
    (planned,) = plan.plan_guests(context, request)
    driver = planned.driver
    if not isinstance(driver, WarmDriver):
        kind = planned.plan.image.guest_type
        raise Refused(f"guests of type {kind} cannot be warm guests")
    kinds = (CoreClaim, MemoryClaim, RamClaim)
    claims = [
        claim
        for claim in planned.claims
        if isinstance(claim, kinds)
        or (isinstance(claim, PoolClaim) and claim.pool == host_ids.POOL)
    ]
    (placement,), _ = ledger.place(start.journal, [claims], share, site.paths)
    if placement.own:  # no job's guest could have the same cores
        raise Refused("warm guests cannot have dedicated cores")
    guest = replace(planned.plan, placement=placement)
    guest = replace(guest, qemu_uid=host_ids.guest_uid(guest, site))
    start.guests = [guest]
    merged = merge(plan.domain_contributions(context, guest, driver))
    owner = plugins.plugin_of_guest_type(guest.image.guest_type)
    each = plan.GuestSpec(guest, driver, owner, (), drop_pluggable(merged), ())
    start.enter("pre-boot")
    acquire_all(start, [each], guard=False)  # it has no network interface yet
    accel = kvm.choose(site.node.accel, site.paths.run, site.node.qemu_user).type
    text = render_base(domain_spec(guest, site, accel), merged).encode()
    start.acquire(File(str(guest.state_dir / SPARE_XML), mode=0o600, content=text), guest=guest)
    start.enter("boot")
    boot_one(GuestBoot(start, each, accel, threading.Event(), ports))
    start.enter("ready")
    with _low_priority(guest, site.node.libvirt_uri):
        driver.await_warm(guest, start.deadline)
    hypervisor.suspend_domain(site.node.libvirt_uri, guest.uuid)
    start.enter(spare.WAITS)


@contextlib.contextmanager
def _low_priority(guest: GuestPlan, uri: str) -> Iterator[None]:
    had = hypervisor.cpu_shares(uri, guest.uuid)
    hypervisor.cpu_shares(uri, guest.uuid, max(2, had // _SHARE))  # 2: the minimum of cgroup v1
    _schedule(guest, _LOW)
    yield
    _schedule(guest, 0)
    hypervisor.cpu_shares(uri, guest.uuid, had)


def _schedule(guest: GuestPlan, nice: int) -> None:
    process = process_of(guest.name, guest.uuid)
    for thread in threads(process) if process else ():
        with contextlib.suppress(ProcessLookupError):
            os.setpriority(os.PRIO_PROCESS, int(thread.name), nice)


def main(config: str, keeper: str, ports: str, *words: str) -> int:
    try:
        site, plugins = load(Path(config), node=True)
        wanted = dict(word.split("=", 1) for word in words)
        with helper_process():
            key = boot(site, plugins, keeper, int(ports), wanted)
        sys.stdout.write(f"{key}\n")
    except VtorqueError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
