"""One start of a job's guests, and the part of it that boots them: now, or on the script's word.

As root: in the prologue, or for guests of a :class:`vtorque_core.api_guest.LateDriver` in the
process that the prologue leaves (:mod:`vtorque_core.late`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import syslog
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

from vtorque_core import accel, hypervisor, late, log
from vtorque_core.api_context import ContextItem, EnvVar
from vtorque_core.api_domain import Channel, Console, Disk, Filesystem, Interface
from vtorque_core.api_guest import ORDER_SOCKET, BootedGuest, GuestDriver, LateDriver
from vtorque_core.api_node import GuestPlan, JobUser, Resource
from vtorque_core.config import Site
from vtorque_core.domain import console
from vtorque_core.domain.merge import Contributed, MergedDomain, merge
from vtorque_core.domain.render import DomainSpec, render, tap_name
from vtorque_core.errors import HostFault, printable
from vtorque_core.journal import Journal
from vtorque_core.locks import job_lock
from vtorque_core.plugins import Plugins
from vtorque_core.resources import Domain, Starter

T = TypeVar("T")
_log = logging.getLogger(__name__)


@dataclass
class Start:
    """One start of a job on this node; what action hooks get as ``job`` (api_node.NodeJob)."""

    id: str
    user: JobUser
    site: Site
    deadline: float
    journal: Journal
    plugins: Plugins
    guests: Sequence[GuestPlan] = ()
    acting: str = "core"
    phase: str = "plan"
    warnings: list[str] = field(default_factory=list)

    def warn(self, text: str) -> None:
        """Tell user and admin, once, what the job has to do without (api_node.NodeJob)."""
        if text not in self.warnings:
            self.warnings.append(text)
            _log.warning("%s", text)
            sys.stderr.write(f"vtorque: warning: {printable(text, 2000)}\n")
            syslog.syslog(syslog.LOG_WARNING, f"vtorque {self.id}: {printable(text, 2000)}")

    def acquire(
        self, resource: Resource, guest: GuestPlan | None = None, needs: Iterable[int] = ()
    ) -> int:
        """Journal ``resource``, fsync, create it; return the record's number."""
        if time.monotonic() > self.deadline:
            raise HostFault(f"no time left before {resource.kind}", stage=self.phase)
        index = guest.index if guest is not None else None
        begun = time.monotonic()
        seq = self.journal.acquire(
            resource, plugin=self.acting, guest=index, needs=tuple(needs), phase=self.phase
        )
        millis = (time.monotonic() - begun) * 1000
        _log.debug("%s (%d): %.1f ms", resource.kind, seq, millis, extra={"guest": index})
        return seq

    def enter(self, phase: str) -> None:
        """Begin a phase: it is in the timeline, and in the message if it fails."""
        self.phase = phase
        self.journal.phase(phase)
        log.enter(phase)
        _log.debug("begins")

    def act(self, hook: str) -> None:
        """Run an action hook, plugin by plugin; what it acquires is recorded as that plugin's."""
        for name in self.plugins.names:
            self.acting = name
            begun = time.monotonic()
            with log.about(plugin=name):
                self.plugins.collect(hook, only=name, job=self)
                if hook in self.plugins.hooks_of(name):
                    _log.debug("%s: %.1f ms", hook, (time.monotonic() - begun) * 1000)
        self.acting = "core"


@dataclass(frozen=True)
class Prepared:
    """A guest with everything that its domain is made of. ``owner``: its guest type's plugin."""

    plan: GuestPlan
    driver: GuestDriver
    owner: str
    contributed: Sequence[Contributed]
    merged: MergedDomain
    items: Sequence[ContextItem]
    resources: tuple[Resource, ...]

    @property
    def environ(self) -> Mapping[str, str]:
        """Return the variables among its items."""
        return {item.name: item.value for item in self.items if isinstance(item, EnvVar)}

    def told(self, order: bytes, site: Site) -> Prepared:
        """Return the guest with what an order adds to its domain. Raises Refused."""
        if not isinstance(self.driver, LateDriver):
            raise TypeError(f"{self.plan.name} takes no order")
        added = list(self.driver.late(self.plan, self.items, order, site))
        elements = [each for each in added if not isinstance(each, Resource)]
        more = [Contributed(self.owner, self.owner, element) for element in elements]
        resources = tuple(each for each in added if isinstance(each, Resource))
        return replace(self, merged=merge([*self.contributed, *more]), resources=resources)


def boot_on_order(start: Start, prepared: Sequence[Prepared]) -> None:
    """Leave a process that boots the guests when the job shell sends its order."""
    first = start.guests[0]
    before = log.current()

    def boot(order: bytes) -> list[BootedGuest]:
        log.forget()
        with (
            log.opened(before.again()) if before is not None else contextlib.nullcontext(),
            job_lock(start.site.paths, start.id),
            Journal.open(start.site.paths, start.journal.path) as journal,
        ):
            deadline = time.monotonic() + start.site.node.start_timeout
            now = replace(start, journal=journal, deadline=deadline)
            told = [each.told(order, now.site) for each in prepared]
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

    path = first.run_dir / ORDER_SOCKET
    waiting = late.Waiting(path, start.user.uid, boot)
    lock = str(first.run_dir / "starter.lock")

    def work(begun: Callable[[], None]) -> int:
        start.journal.close()
        return waiting.work(begun)

    start.acquire(Starter(lock=lock, socket=str(path), work=work), guest=first)


def boot_all(start: Start, prepared: Sequence[Prepared]) -> list[int | None]:
    """Boot all guests at once, wait until they are ready, have plugins act on them.

    Returns for each the descriptor of its console, if it is the job's output (``Console``).
    """
    start.enter("boot")
    site = start.site
    chosen = accel.choose(site.node.accel, site.paths.run, site.node.qemu_user)
    _log.info("%d guests start with %s", len(prepared), chosen.type)
    if chosen.warning:
        _log.warning("%s", chosen.warning)
        sys.stderr.write(f"vtorque: warning: {chosen.warning}\n")
    consoles = _in_parallel(prepared, lambda p: _boot_one(start, p, chosen.type))
    start.enter("ready")
    _in_parallel(prepared, lambda p: _await(start, p), lambda p: _end_guest(start, p))
    start.enter("post-boot")
    start.act("vtorque_post_boot")
    return consoles


def _boot_one(start: Start, each: Prepared, accel_type: Literal["kvm", "tcg"]) -> int | None:
    with log.about(guest=each.plan.index):
        return _boot(start, each, accel_type)


def _boot(start: Start, each: Prepared, accel_type: Literal["kvm", "tcg"]) -> int | None:
    guest, site = each.plan, start.site
    spec = DomainSpec(
        guest, accel_type, site.node.qemu_user, allow_qemu_args=site.node.allow_qemu_args
    )
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
    templates = site.path.parent / "templates"
    overrides = templates if templates.is_dir() else None
    xml = render(spec, each.merged, sockets=sockets, taps=taps, overrides=overrides)
    uri, output = site.node.libvirt_uri, each.merged.single(Console)
    paused = output is not None and output.path is not None
    start.acquire(Domain(guest.name, guest.uuid, uri, xml=xml, paused=paused), guest=guest)
    try:
        for channel in each.merged.lists(Channel):
            owner = guest.user.uid if channel.owner == "job" else 0
            os.chown(channel.path, owner, 0, follow_symlinks=False)
            os.chmod(channel.path, 0o600)  # noqa: PTH101 - below a root-only directory
    except FileNotFoundError:
        raise _failed(each, HostFault("ended as soon as it was started", start.phase)) from None
    if output is None or output.path is None:
        return None
    descriptor = late.connect_console(output.path)
    hypervisor.resume_domain(uri, guest.uuid)
    return descriptor


def _await(start: Start, each: Prepared) -> None:
    begun = time.monotonic()

    def step(name: str) -> None:
        start.journal.phase(name, guest=each.plan.index)
        _log.info("%s after %.1f s", name, time.monotonic() - begun)

    with log.about(guest=each.plan.index):
        try:
            each.driver.await_ready(each.plan, start.deadline, step)
        except HostFault as error:
            raise _failed(each, error) from error
        step("ready")


def _failed(each: Prepared, error: HostFault) -> HostFault:
    """Return the error with what the guest's console said last, while there still is one."""
    lines = console.tail(each.plan.state_dir / "console.log")
    said = (console.heading(each.plan.hostname), *(f"| {line}" for line in lines))
    return HostFault(str(error), detail=(*error.detail, *(said if lines else ())))


def _end_guest(start: Start, each: Prepared) -> None:
    with contextlib.suppress(HostFault):  # the teardown will say it
        hypervisor.destroy_domain(start.site.node.libvirt_uri, each.plan.uuid, 5.0)


def _in_parallel(
    prepared: Sequence[Prepared],
    work: Callable[[Prepared], T],
    stop: Callable[[Prepared], None] = lambda _: None,
) -> list[T]:
    """Do the work for all guests at once; if one fails ``stop`` the others, raise its error."""
    with ThreadPoolExecutor(max_workers=len(prepared)) as pool:
        futures = [pool.submit(work, each) for each in prepared]
        first = wait(futures, return_when=FIRST_EXCEPTION)
        failed = [future for future in futures if future in first.done and future.exception()]
        for each, future in zip(prepared, futures, strict=True):
            if failed and not future.done():
                stop(each)
    for future in failed:
        future.result()
    return [future.result() for future in futures]
