"""Boot a job's guests, at once or when the job shell orders it.

Runs as root, in the prologue or in the process of :mod:`vtorque_core.resources.starter`.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Literal, TypeVar

from vtorque_core.api import hooks
from vtorque_core.api.acquired import Resource
from vtorque_core.api.boot_source import Boot, ColdBoot
from vtorque_core.api.guest_driver import ORDER_SOCKET, BootedGuest, ClockDriver, LateDriver
from vtorque_core.api.libvirt_domain import Channel, Console, Disk, Filesystem, Interface
from vtorque_core.base import hypervisor, kvm, safefs
from vtorque_core.base.errors import HostFault, Refused, VtorqueError
from vtorque_core.base.hypervisor import Overdue, run_bounded
from vtorque_core.base.locks import job_lock, libvirt_worker
from vtorque_core.base.names import tap_name
from vtorque_core.config.site_config import Site
from vtorque_core.node.start.attempt import StartAttempt
from vtorque_core.node.start.guest_resources import daemons, domain_spec, root_disks
from vtorque_core.plan.domain.merge import Contributed, merge
from vtorque_core.plan.domain.render import NAMESPACE, metadata, render, render_devices
from vtorque_core.plan.domain.saved_domain import adapt_xml
from vtorque_core.plan.guests import GuestSpec
from vtorque_core.records import console, log
from vtorque_core.records.journal import Journal
from vtorque_core.records.reading import ARRIVES, DOMAIN, read
from vtorque_core.resources import netfilter, stopped_daemons
from vtorque_core.resources.domain import Domain
from vtorque_core.resources.starter import BootStarter

T = TypeVar("T")
ARRIVAL_TIME = 3700.0
"""Timeout in seconds of a migration to this node; longer than the source node's."""
_OVERDUE = 5.0  # seconds by which a boot source may exceed its deadline
_DESTROYED = 10.0  # seconds to destroy the guest of a failed boot source
_log = logging.getLogger(__name__)


def boot_on_order(start: StartAttempt, prepared: Sequence[GuestSpec]) -> None:
    first = start.guests[0]

    def boot(order: bytes) -> list[BootedGuest]:
        with (
            log.reopen_log(),
            job_lock(start.site.paths, start.job.id),
            Journal.open(start.site.paths, start.journal.path) as journal,
        ):
            deadline = time.monotonic() + start.site.node.start_timeout
            now = replace(start, journal=journal, deadline=deadline)
            told = [_add_late_items(each, order, now.site) for each in prepared]
            for each in told:
                now.acquire_all(each.resources, guest=each.plan, acting=each.owner)
            consoles = boot_all(now, guest_boots(now, told))
            now.enter("run")
        return [
            BootedGuest(each.plan.hostname, each.plan.rank, descriptor)
            for each, descriptor in zip(told, consoles, strict=True)
            if descriptor is not None
        ]

    lock, path = str(first.run_dir / "starter.lock"), str(first.run_dir / ORDER_SOCKET)
    start.acquire(BootStarter(lock=lock, socket=path, uid=start.user.uid, boot=boot), guest=first)


def _add_late_items(each: GuestSpec, order: bytes, site: Site) -> GuestSpec:
    if not isinstance(each.driver, LateDriver):
        raise TypeError(f"the guest driver of {each.plan.name} must be a LateDriver")
    added = list(each.driver.late_items(each.plan, each.items, order, site))
    elements = [one for one in added if not isinstance(one, Resource)]
    more = [Contributed(each.owner, each.owner, element) for element in elements]
    resources = tuple(one for one in added if isinstance(one, Resource))
    return replace(each, merged=merge([*each.contributed, *more]), resources=resources)


def guest_boots(start: StartAttempt, prepared: Sequence[GuestSpec]) -> list[GuestBoot]:
    node = start.site.node
    chosen = kvm.choose(node.accel, start.site.paths.run, node.qemu_user)
    _log.debug("%d guests start with %s", len(prepared), chosen.type)
    if chosen.warning:
        _log.warning("%s", chosen.warning)
        sys.stderr.write(f"vtorque: warning: {chosen.warning}\n")
    failed = threading.Event()
    return [GuestBoot(start, each, chosen.type, failed) for each in prepared]


def boot_all(
    start: StartAttempt, boots: Sequence[GuestBoot], booting: Callable[[], None] = lambda: None
) -> list[int | None]:
    """Boot all guests in parallel, wait until they are ready, and call ``vtorque_post_boot``.

    Calls ``booting`` when the domains run. Returns the descriptor of each guest's
    :class:`Console`, or None.
    """
    start.enter("boot")
    stopped = threading.Event()

    def boot(each: GuestBoot) -> tuple[GuestBoot, int | None]:
        try:
            if each.source.fallback:
                each.halve_time()
            try:
                return each, boot_one(each)
            except HostFault as error:
                if not each.source.fallback:
                    raise
                each = _fall_back(each, error)
                return each, boot_one(each)
        except BaseException:
            each.failed.set()  # ends the wait of guests that wait for the job's other guests
            raise

    def ready(each: GuestBoot) -> None:
        if each.source.fallback:
            each.halve_time()
            try:
                return await_ready(each)
            except HostFault as error:
                if stopped.is_set():  # destroyed by stop(), because another guest has failed
                    raise
                each = _fall_back(each, error)
                boot_one(each)
                if stopped.is_set():  # stop() ran before the new domain existed
                    _end(start, each)
                    raise
        return await_ready(each)

    def stop(each: GuestBoot) -> None:
        stopped.set()
        if not each.source.remote:
            _end(start, each)

    booted = _run_parallel(boots, boot)
    booting()
    start.enter("ready")
    _run_parallel([each for each, _ in booted], ready, stop)
    start.enter("post-boot")
    start.call_hook(hooks.vtorque_post_boot)
    return [console for _, console in booted]


class GuestBoot:
    """The boot of one guest; boot sources get it as :class:`vtorque_core.api.guest_plan.Boot`.

    ``ports`` is the number of slots for hotplugged devices.
    """

    def __init__(
        self, start: StartAttempt, each: GuestSpec, accel: Literal["kvm", "tcg"],
        failed: threading.Event, ports: int = 0,
    ) -> None:  # fmt: skip
        guest, merged = each.plan, each.merged
        self.start, self.each, self.accel, self.ports = start, each, accel, ports
        self.guest, self.source, self.site = guest, guest.source, start.site
        self.failed, self.uri = failed, self.site.node.libvirt_uri
        self.paths = self.site.paths
        self.until, self.begun = math.inf, 0.0
        self.channels: Sequence[Path] = [Path(channel.path) for channel in merged.lists(Channel)]
        output = merged.single(Console)
        self.console = output.path if output is not None else None
        nics = merged.aliases(Interface).items()
        self.taps = {alias: tap_name(nic.mac) for alias, nic in nics if nic.filtered}
        self._unfiltered = [*self.taps.values()]
        shares, disks = merged.aliases(Filesystem).items(), merged.aliases(Disk).items()
        stems = {alias: f"fs-{share.name}" for alias, share in shares}
        stems |= {alias: f"disk-{disk.name}" for alias, disk in disks if disk.user_owned}
        self._sockets = {alias: f"{guest.run_dir}/{stem}.sock" for alias, stem in stems.items()}
        self._locks = [f"{guest.run_dir}/{stem}.lock" for stem in stems.values()]

    @property
    def deadline(self) -> float:
        return min(self.start.deadline, self.until)

    def halve_time(self) -> None:
        """Limit this boot to half of the remaining time, because a cold boot may follow."""
        self.until = (time.monotonic() + self.start.deadline) / 2

    @cached_property
    def rendered(self) -> str:
        spec = domain_spec(self.guest, self.site, self.accel, self.ports)
        return render(spec, self.each.merged, sockets=self._sockets, taps=self.taps)

    def time_left(self, least: float = 0.0) -> float:
        left = self.deadline - time.monotonic()
        if left <= least:
            raise HostFault("guest not ready within [node] start_timeout", stage=self.start.phase)
        return left

    def watch_daemons(self, seconds: float | None = None) -> AbstractContextManager[None]:
        """Kill daemons of shares and disks that SIGSTOP has stopped: :func:`kill_stopped`."""
        error_type = Refused if self.guest.image.source else HostFault
        return stopped_daemons.kill_stopped(self._locks, seconds, error_type)

    def worker(self) -> AbstractContextManager[None]:
        return libvirt_worker(self.paths, self.guest.user.uid, self.start.deadline, self.failed)

    def create(self) -> None:
        """Create the domain, paused until its packet filters are complete."""
        xml = self.rendered
        self.time_left()
        # No timeout: an abandoned call could create the domain after the teardown looked for it.
        with self._filter_meanwhile(), self.watch_daemons():
            hypervisor.create_domain(self.uri, xml, paused=True)

    @contextlib.contextmanager
    def _filter_meanwhile(self) -> Iterator[None]:
        """Filter each NIC when libvirt has created its tap device, while QEMU starts."""
        end, ended = os.pipe()

        def work() -> None:
            with contextlib.suppress(Exception):  # boot_one() tries again
                self.filter_nics(lambda tap: netfilter.await_tap(tap, end) and self.time_left() > 0)

        # A daemon thread, so that this process can end although libvirtd hangs.
        thread = threading.Thread(target=work, name="filter NICs", daemon=True)
        with safefs.closing(end):
            thread.start()
            try:
                yield
            finally:
                os.close(ended)
                thread.join()

    def filter_nics(self, is_there: Callable[[str], bool] = lambda _: True) -> None:
        for tap in filter(is_there, [*self._unfiltered]):
            netfilter.filter_tap(tap)
            self._unfiltered.remove(tap)

    def adapt_xml(self, xml: str, state_dir: Path, run_dir: Path) -> str:
        return adapt_xml(xml, self.rendered, (state_dir, run_dir), self.guest)

    def restore(self, memory: Path, state_dir: Path, run_dir: Path) -> None:
        xml = self.adapt_xml(hypervisor.saved_xml(self.uri, str(memory)), state_dir, run_dir)
        # QEMU reads all memory between its first and its last message to the daemons.
        with self.watch_daemons(seconds := self.time_left(Domain.retry_seconds)):
            hypervisor.restore_domain(self.uri, str(memory), xml, seconds)

    def adopt_guest(self) -> None:
        guest = self.guest
        spec = domain_spec(guest, self.site, self.accel)
        devices = render_devices(spec, self.each.merged, self._sockets, self.taps)
        own = guest.placement.cores.get("vcpu", ()) or guest.placement.share
        host = max((cpu for cpu in guest.host.cpus), default=-1) + 1
        cpus = tuple(cpu in own for cpu in range(host)) if own else ()
        owner = (metadata(self.rendered), "vtorque", NAMESPACE)
        self.time_left()
        with self.watch_daemons():
            hypervisor.adopt_domain(self.uri, guest.uuid, devices, owner, cpus, self.filter_nics)

    def resume(self) -> None:
        with self.worker(), self.watch_daemons():
            try:
                hypervisor.resume_domain(self.uri, self.guest.uuid)
            except HostFault as error:
                self.start.phase = "ready"  # an own image can end its guest at once
                raise add_console_tail(self.each, error) from None

    def await_ready(self) -> None:
        self.each.driver.await_ready(self.guest, self.deadline, self.note_stage)

    def note_stage(self, stage: str) -> None:
        self.start.journal.phase(stage, guest=self.guest.index)
        _log.info("%s after %.1f s", stage, time.monotonic() - self.begun)

    def set_clock(self) -> None:
        if isinstance(self.each.driver, ClockDriver):
            self.each.driver.set_clock(self.guest.run_dir, self.deadline)


def boot_one(boot: GuestBoot) -> int | None:
    guest, source, start = boot.guest, boot.source, boot.start
    domain = Domain(guest.name, guest.uuid, boot.uri, start=partial(_run_step, boot, source.start))
    if source.remote:
        start.enter(ARRIVES)
    # During a migration, the source node's libvirtd needs this node's workers: hold none.
    with boot.watch_daemons(ARRIVAL_TIME) if source.remote else boot.worker():
        try:
            start.acquire(domain, guest=guest)
        except BaseException:
            if not source.fallback:
                boot.failed.set()
            # Free the worker for other guests; the teardown reports failures. A remote guest may
            # have arrived: the source node decides which node owns it.
            with contextlib.suppress(HostFault):
                if not source.remote:
                    domain.release()
            raise
    if source.remote:  # a migration may take longer than a start
        start.deadline = time.monotonic() + start.site.node.start_timeout
    boot.filter_nics()
    _hand_over_channels(boot)
    console = None if boot.console is None else connect_console(boot.console)
    _run_step(boot, source.run)
    return console


def _hand_over_channels(boot: GuestBoot) -> None:
    with safefs.name_errors(f"a channel of {boot.guest.name}", stage="boot"):
        for channel in boot.each.merged.lists(Channel):
            owner = boot.guest.user.uid if channel.owner == "job" else os.geteuid()
            os.chown(channel.path, owner, os.getegid(), follow_symlinks=False)
            os.chmod(channel.path, 0o600)  # noqa: PTH101 - below a root-only directory


def await_ready(boot: GuestBoot) -> None:
    boot.begun = time.monotonic()
    try:
        _run_step(boot, boot.source.await_ready)
    except HostFault as error:
        raise add_console_tail(boot.each, error) from error
    boot.note_stage("ready")


def _run_step(boot: GuestBoot, step: Callable[[Boot], None]) -> None:
    source = boot.source
    seconds = boot.deadline + _OVERDUE - time.monotonic()
    try:
        if source.remote:  # a migration has its own deadline, and the source node decides
            step(boot)
        else:
            run_bounded(lambda: step(boot), seconds, f"boot source {source.name}")
    except VtorqueError:
        raise
    except Overdue:
        # If it returns later, its next call of ``boot`` fails because no time is left.
        what = f"boot source {source.name} has not returned by its deadline"
        raise HostFault(what, stage=boot.start.phase) from None
    except Exception as error:
        log.log_defect(boot.start.id)
        what = f"boot source {boot.source.name}: {type(error).__name__}: {error}"
        raise HostFault(what, stage=boot.start.phase) from error


def _fall_back(boot: GuestBoot, error: HostFault) -> GuestBoot:
    start, source = boot.start, boot.source
    _log.warning("boot source %s: %s: booting the image instead", source.name, error)
    boot.until = 0.0  # if the source's step still runs, its next deadline check fails
    hypervisor.destroy_domain(boot.uri, boot.guest.uuid, _DESTROYED)
    for record in read(start.journal.path).open:
        if record.kind == DOMAIN and record.guest == boot.guest.index:
            start.journal.released(record.seq)
    cold = replace(boot.each, plan=replace(boot.guest, source=ColdBoot()))
    (cold.plan.state_dir / "console.log").unlink(missing_ok=True)
    resources = [*root_disks(cold, start.site), *daemons(cold)]
    for resource in reversed(resources):  # the disk before the tmpfs that contains it
        resource.release()
    start.acquire_all(resources, guest=cold.plan)
    return GuestBoot(start, cold, boot.accel, boot.failed)


def add_console_tail(each: GuestSpec, error: HostFault) -> HostFault:
    lines = console.tail(each.plan.state_dir / "console.log")
    said = (console.heading(each.plan.hostname), *(f"| {line}" for line in lines))
    return HostFault(str(error), detail=(*error.detail, *(said if lines else ())))


def _end(start: StartAttempt, boot: GuestBoot) -> None:
    with contextlib.suppress(HostFault):  # the teardown reports it
        hypervisor.destroy_domain(start.site.node.libvirt_uri, boot.guest.uuid, 5.0)


def connect_console(path: str) -> int:
    with (
        safefs.name_errors(f"the guest's console {path}"),
        socket.socket(socket.AF_UNIX) as connection,
    ):
        connection.connect(path)
        return connection.detach()


def _run_parallel(
    boots: Sequence[GuestBoot],
    work: Callable[[GuestBoot], T],
    stop: Callable[[GuestBoot], None] = lambda _: None,
) -> list[T]:
    def one(each: GuestBoot) -> T:
        with log.log_context(guest=each.guest.index):
            return work(each)

    with ThreadPoolExecutor(max_workers=len(boots)) as pool:
        futures = [pool.submit(one, each) for each in boots]
        first = wait(futures, return_when=FIRST_EXCEPTION)
        failed = [future for future in futures if future in first.done and future.exception()]
        for each, future in zip(boots, futures, strict=True):
            if failed and not future.done():
                stop(each)
    for future in failed:
        future.result()
    return [future.result() for future in futures]
