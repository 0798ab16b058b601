"""The part of a start that boots the guests: now, or on the script's word.

As root: in the prologue, or for guests of a :class:`vtorque_core.api.guest_driver.LateDriver` in
the process that the prologue leaves (:mod:`vtorque_core.resources.starter`).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Literal, TypeVar

from vtorque_core.api.acquired import Resource
from vtorque_core.api.guest_driver import ORDER_SOCKET, BootedGuest, ClockDriver, LateDriver
from vtorque_core.api.guest_plan import GuestPlan, SavedGuest
from vtorque_core.api.libvirt_domain import Channel, Console, Disk, Filesystem, Interface
from vtorque_core.base import hypervisor, kvm
from vtorque_core.base.errors import HostFault
from vtorque_core.base.locks import job_lock, libvirt_worker
from vtorque_core.node.start import spare
from vtorque_core.node.start.attempt import Start
from vtorque_core.node.start.guest_resources import domain_spec
from vtorque_core.plan.domain.merge import Contributed, merge
from vtorque_core.plan.domain.render import render, tap_name
from vtorque_core.plan.domain.saved import moved
from vtorque_core.plan.guests import Prepared
from vtorque_core.records import console, log
from vtorque_core.records.journal import Journal
from vtorque_core.records.reading import ARRIVES
from vtorque_core.resources import netfilter, stopped_daemons
from vtorque_core.resources.domain import Domain
from vtorque_core.resources.starter import Starter
from vtorque_core.site.config import Site

T = TypeVar("T")
ARRIVAL_TIME = 3700.0
"""Seconds for a guest to arrive from another node: more than its sender allows."""
_log = logging.getLogger(__name__)


def boot_on_order(start: Start, prepared: Sequence[Prepared]) -> None:
    """Leave a process that boots the guests when the job shell sends its order."""
    first = start.guests[0]

    def boot(order: bytes) -> list[BootedGuest]:
        with (
            log.reopened(),
            job_lock(start.site.paths, start.job.id),
            Journal.open(start.site.paths, start.journal.path) as journal,
        ):
            deadline = time.monotonic() + start.site.node.start_timeout
            now = replace(start, journal=journal, deadline=deadline)
            told = [_told(each, order, now.site) for each in prepared]
            for each in told:
                now.acting = each.owner
                for resource in each.resources:
                    now.acquire(resource, guest=each.plan)
            now.acting = "core"
            consoles = boot_all(now, told)
            now.enter("run")
        return [
            BootedGuest(each.plan.hostname, each.plan.rank, descriptor)
            for each, descriptor in zip(told, consoles, strict=True)
            if descriptor is not None
        ]

    lock, path = str(first.run_dir / "starter.lock"), str(first.run_dir / ORDER_SOCKET)
    start.acquire(Starter(lock=lock, socket=path, uid=start.user.uid, boot=boot), guest=first)


def _told(each: Prepared, order: bytes, site: Site) -> Prepared:
    """Return the guest with what an order adds to its domain. Raises Refused."""
    if not isinstance(each.driver, LateDriver):
        raise TypeError(f"{each.plan.name} takes no order")
    added = list(each.driver.late(each.plan, each.items, order, site))
    elements = [one for one in added if not isinstance(one, Resource)]
    more = [Contributed(each.owner, each.owner, element) for element in elements]
    resources = tuple(one for one in added if isinstance(one, Resource))
    return replace(each, merged=merge([*each.contributed, *more]), resources=resources)


def boot_all(start: Start, prepared: Sequence[Prepared]) -> list[int | None]:
    """Boot all guests at once, wait until they are ready, have plugins act on them.

    Returns for each the descriptor of its console, if it is the job's output (``Console``).
    """
    start.enter("boot")
    site = start.site
    chosen = kvm.choose(site.node.accel, site.paths.run, site.node.qemu_user)
    _log.debug("%d guests start with %s", len(prepared), chosen.type)
    if chosen.warning:
        _log.warning("%s", chosen.warning)
        sys.stderr.write(f"vtorque: warning: {chosen.warning}\n")
    failed, stopped = threading.Event(), threading.Event()

    def boot(each: Prepared) -> tuple[Prepared, int | None]:
        if each.plan.spare:
            try:
                return each, boot_one(start, each, chosen.type, failed)
            except HostFault as error:
                each = _anew(start, each, error)
        try:
            return each, boot_one(start, each, chosen.type, failed)
        except BaseException:
            failed.set()  # who comes from another node waits for all others
            raise

    def ready(each: Prepared) -> None:
        if each.plan.spare:
            try:
                return await_ready(start, each, (time.monotonic() + start.deadline) / 2)
            except HostFault as error:
                if stopped.is_set():  # by us, so a cold one is of no use either
                    raise
                each = _anew(start, each, error)
                boot_one(start, each, chosen.type, failed)
        return await_ready(start, each, start.deadline)

    def stop(each: Prepared) -> None:
        stopped.set()
        if not each.plan.comes:  # else it is nowhere else any more
            _end(start, each)

    booted = _in_parallel(prepared, boot)
    prepared, consoles = [each for each, _ in booted], [console for _, console in booted]
    start.enter("ready")
    _in_parallel(prepared, ready, stop)
    start.enter("post-boot")
    start.act("vtorque_post_boot")
    return consoles


def _anew(start: Start, each: Prepared, error: HostFault) -> Prepared:
    """Return a guest that a spare one could not become, to be booted as any."""
    _log.warning("the guest that was booted before is of no use (%s): it is booted anew", error)
    return spare.cold(start, each)


def boot_one(
    start: Start,
    each: Prepared,
    accel_type: Literal["kvm", "tcg"],
    failed: threading.Event,
    ports: int = 0,
) -> int | None:
    """Start a guest's domain, or have its spare one become the job's; its channels' owners too.

    Returns as :func:`boot_all`. ``ports``: for so many devices it is to have room. Raises
    HostFault.
    """
    guest, site = each.plan, start.site
    sockets = {
        alias: f"{guest.run_dir}/fs-{element.name}.sock"
        for alias, element in each.merged.aliases(Filesystem).items()
    } | {
        alias: f"{guest.run_dir}/disk-{disk.name}.sock"
        for alias, disk in each.merged.aliases(Disk).items()
        if disk.user_owned
    }
    taps = {
        alias: tap_name(nic.mac)
        for alias, nic in each.merged.aliases(Interface).items()
        if nic.filtered
    }
    uri, output = site.node.libvirt_uri, each.merged.single(Console)
    paused = output is not None and output.path is not None
    daemons = tuple(path.removesuffix(".sock") + ".lock" for path in sockets.values())
    domain = Domain(guest.name, guest.uuid, uri, paused=paused, daemons=daemons)
    if guest.spare:
        domain = replace(domain, taken=spare.become(each, site, accel_type, sockets, taps))
    else:
        spec = domain_spec(guest, site, accel_type, ports)
        xml = render(spec, each.merged, sockets=sockets, taps=taps, overrides=site.templates)
        domain = replace(domain, xml=xml)
    if guest.saved is not None:
        domain = _going_on(start, domain, guest, guest.saved, failed)
    # What comes is awaited with all others of its job; who sends it has libvirt's workers for it.
    waits = libvirt_worker(site.paths, guest.user.uid, start.deadline, failed)
    with contextlib.nullcontext() if guest.comes else waits:
        try:
            start.acquire(domain, guest=guest)
        except BaseException:
            if not guest.spare:
                failed.set()
            # Else its worker would wait on when others count on it; the teardown says what fails.
            # One that comes from another node may have come: who has it is decided by who sent it.
            with contextlib.suppress(HostFault):
                if not guest.comes:
                    domain.release()
            raise
    if guest.comes:  # which may have taken longer than any start
        start.deadline = time.monotonic() + site.node.start_timeout
    for tap in taps.values():
        netfilter.filter_reserved_macs(tap)
    try:
        for channel in each.merged.lists(Channel):
            owner = guest.user.uid if channel.owner == "job" else os.geteuid()
            os.chown(channel.path, owner, os.getegid(), follow_symlinks=False)
            os.chmod(channel.path, 0o600)  # noqa: PTH101 - below a root-only directory
    except FileNotFoundError:
        error = HostFault("ended as soon as it was started", start.phase)
        raise with_last_words(each, error) from None
    if guest.saved is not None and not guest.comes:
        _let_run(start, guest, domain, failed)
    if output is None or output.path is None:
        return None
    descriptor = connect_console(output.path)
    hypervisor.resume_domain(uri, guest.uuid)
    return descriptor


def _going_on(
    start: Start, domain: Domain, guest: GuestPlan, saved: SavedGuest, failed: threading.Event
) -> Domain:
    """Return the domain of a saved guest, which is as libvirt had made it, where its files are."""
    if saved.arrive is not None:
        xml = moved(saved.xml, domain.xml, saved, guest.state_dir, guest.run_dir)
        start.enter(ARRIVES)
        arrive = functools.partial(saved.arrive, failed=failed)
        return replace(domain, xml=xml, arrive=arrive, seconds=ARRIVAL_TIME)
    file = str(saved.memory)
    was = hypervisor.saved_xml(domain.uri, file)
    xml = moved(was, domain.xml, saved, guest.state_dir, guest.run_dir)
    return replace(domain, xml=xml, saved=file, seconds=start.deadline - time.monotonic())


def _let_run(start: Start, guest: GuestPlan, domain: Domain, failed: threading.Event) -> None:
    """Have a restored guest run. QEMU speaks to its user's daemons first, as at a boot."""
    if guest.saved is not None and guest.saved.gate is not None:
        guest.saved.gate(start.deadline, failed)
    with (
        libvirt_worker(start.site.paths, guest.user.uid, start.deadline, failed),
        stopped_daemons.ended(domain.daemons),
    ):
        hypervisor.resume_domain(domain.uri, guest.uuid)


def await_ready(start: Start, each: Prepared, until: float) -> None:
    """Wait until the guest says that it is ready, at most until a time.monotonic().

    Raises HostFault with the last words of its console.
    """
    begun = time.monotonic()

    def step(name: str) -> None:
        start.journal.phase(name, guest=each.plan.index)
        _log.info("%s after %.1f s", name, time.monotonic() - begun)

    try:
        each.driver.await_ready(each.plan, until, step)
        if each.plan.saved is not None and isinstance(each.driver, ClockDriver):
            each.driver.set_clock(each.plan.run_dir, until)
    except HostFault as error:
        raise with_last_words(each, error) from error
    step("ready")


def with_last_words(each: Prepared, error: HostFault) -> HostFault:
    """Return the error with what the guest's console said last, while there still is one."""
    lines = console.tail(each.plan.state_dir / "console.log")
    said = (console.heading(each.plan.hostname), *(f"| {line}" for line in lines))
    return HostFault(str(error), detail=(*error.detail, *(said if lines else ())))


def _end(start: Start, each: Prepared) -> None:
    """End a guest that is not waited for any more, since another has failed."""
    with contextlib.suppress(HostFault):  # the teardown will say it
        hypervisor.destroy_domain(start.site.node.libvirt_uri, each.plan.uuid, 5.0)


def connect_console(path: str) -> int:
    """Return a descriptor connected to a guest's console. Raises HostFault if QEMU has ended."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(path)
    except OSError as error:
        connection.close()
        raise HostFault(f"its console {path}: {error.strerror}") from None
    return connection.detach()


def _in_parallel(
    prepared: Sequence[Prepared],
    work: Callable[[Prepared], T],
    stop: Callable[[Prepared], None] = lambda _: None,
) -> list[T]:
    """Do the work for all guests at once; if one fails ``stop`` the others, raise its error."""

    def one(each: Prepared) -> T:
        with log.about(guest=each.plan.index):
            return work(each)

    with ThreadPoolExecutor(max_workers=len(prepared)) as pool:
        futures = [pool.submit(one, each) for each in prepared]
        first = wait(futures, return_when=FIRST_EXCEPTION)
        failed = [future for future in futures if future in first.done and future.exception()]
        for each, future in zip(prepared, futures, strict=True):
            if failed and not future.done():
                stop(each)
    for future in failed:
        future.result()
    return [future.result() for future in futures]
