"""Guests that come here from another node while they run: a start that awaits them. As root.

The other node's root tells in one line what comes, and is answered in lines: with the XML that each
guest is to have here, once all that they need is here; then that they run here. From the first
answer on nothing is given up here: who has a guest knows the one who sends it
(``vtorque_survive.move``). When that one's line ends, this process ends, and all stays. If it has
ended before, nothing was sent, and all is released.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vtorque_core import __version__
from vtorque_core.api.batch_system import BatchJob, MovingAdapter, NodeAdapter
from vtorque_core.api.boot_source import Boot, BootSource, Identity
from vtorque_core.api.children import readable
from vtorque_core.api.log_levels import parse
from vtorque_core.api.read_apart import reader
from vtorque_core.base import hypervisor
from vtorque_core.base.errors import EXIT_FAILED, EXIT_OK, HostFault, Refused, VtorqueError
from vtorque_core.base.locks import job_lock
from vtorque_core.node.end.reap import release_job, tell_ended
from vtorque_core.node.start.boot import ARRIVAL_TIME
from vtorque_core.node.start.start_order import start_job
from vtorque_core.plan import guests as plan
from vtorque_core.records import log
from vtorque_core.records.reading import find
from vtorque_core.resources import virtiofs_daemon
from vtorque_core.site.config import Site
from vtorque_core.site.plugins import Plugins
from vtorque_core.site.values import convert

_MOST, _TELLS = 1 << 20, 30.0  # bytes of what is told, and seconds for it
_LOOK = 0.05  # seconds; that a domain runs is an event of libvirt's only for who runs its loop
_log = logging.getLogger(__name__)


class LeftAlone(BaseException):
    """Whoever sends the guest is there no more: it is theirs to say who has it."""


@dataclass(frozen=True)
class ArrivingGuest(Identity):
    """A guest that runs on the other node: where its files are there, and libvirt's XML of it."""

    state_dir: Path
    run_dir: Path
    xml: str


@dataclass(frozen=True)
class Told:
    """What the other node tells: the job, which node its guests leave and to which, the guests.

    ``nodes``: where the job's guests are then, in rank order.
    """

    job: str
    nodes: tuple[str, ...]
    leaves: str
    to: str
    versions: Mapping[str, str]
    guests: tuple[ArrivingGuest, ...]

    @classmethod
    def read(cls, line: bytes) -> Told:
        """Return what a line tells. Raises HostFault."""
        try:
            told: Told = convert(cls, json.loads(line))
            if told.to not in told.nodes:
                raise ValueError(f"node {told.to!r} is none of the job's")
            if not told.guests:
                raise ValueError("no guest")
        except (ValueError, TypeError, RecursionError) as error:
            raise HostFault(f"what comes here cannot be read: {error}") from None
        return told


class _Sender:
    """Who sends the guests: what it is told, and whether it is still there."""

    def __init__(self, requests: int, answers: int) -> None:
        self._requests, self._answers = requests, answers
        self._ready: dict[str, str] = {}
        self._lock = threading.Lock()
        self.awaits = False

    def told(self) -> bytes:
        """Return its line. Raises HostFault."""
        said, until = bytearray(), time.monotonic() + _TELLS
        while not said.endswith(b"\n"):
            left = until - time.monotonic()
            data = os.read(self._requests, 1 << 16) if readable([self._requests], left) else b""
            said += data
            if not data or len(said) > _MOST:
                raise HostFault("nobody has said what is to come here")
        return bytes(said)

    def say(self, **what: Any) -> None:
        """Tell it. Raises LeftAlone: it is not there."""
        try:
            os.write(self._answers, json.dumps(what).encode() + b"\n")
        except OSError:
            raise LeftAlone from None

    def arrive(
        self,
        of: Collection[str],
        site: Site,
        uuid: str,
        xml: str,
        failed: threading.Event,
    ) -> None:
        """Have a guest be sent, once all of them can be; return when it runs here.

        By a thread for each guest. Raises HostFault, LeftAlone; LeftAlone also after an hour: a
        node that has lost its power says no end.
        """
        self._require_there(0.0)
        with self._lock:
            self._ready[uuid] = xml
            if self._ready.keys() == set(of):
                self.awaits = True
                self.say(xml=self._ready)
        ready, until = time.monotonic() + site.node.start_timeout, time.monotonic() + ARRIVAL_TIME
        while not self.awaits or hypervisor.domain_state(site.node.libvirt_uri, uuid) != "runs":
            self._require_there(_LOOK)
            if not self.awaits and (failed.is_set() or time.monotonic() >= ready):
                raise HostFault("another guest of the job is not ready to come here")
            if time.monotonic() >= until:
                raise LeftAlone

    def _require_there(self, seconds: float) -> None:
        if readable([self._requests], seconds) and not os.read(self._requests, 1):
            raise LeftAlone


@dataclass(frozen=True)
class Migration(BootSource):
    """A guest that runs on another node, and is sent to this one when all guests can be."""

    guest: ArrivingGuest
    arrive: Callable[[str, str, threading.Event], None]

    name = "migration"
    brings_disk = True
    remote = True

    @property
    def identity(self) -> Identity:
        """What it keeps: all."""
        return self.guest

    def start(self, boot: Boot) -> None:
        """Tell the sender with which XML the guest can come; return when it runs here."""
        xml = boot.moved(self.guest.xml, self.guest.state_dir, self.guest.run_dir)
        self.arrive(self.guest.uuid, xml, boot.failed)

    def ready(self, boot: Boot) -> None:
        """Ask the guest whether it is ready, and have it set its clock, which stood still."""
        boot.await_ready()
        boot.set_clock()


def run(adapter: NodeAdapter, site: Site, plugins: Plugins, requests: int, answers: int) -> int:
    """Receive what guests are told of; return the exit code. ``requests``, ``answers``: files."""
    sender = _Sender(requests, answers)
    try:
        with reader():
            _receive(adapter, site, plugins, sender)
        sender.say(here=True)
    except LeftAlone:
        return EXIT_FAILED
    except Exception as error:
        known = isinstance(error, VtorqueError)
        if not known:
            log.defect("that comes from another node")
        with contextlib.suppress(LeftAlone):
            sender.say(failed=str(error) if known else f"{type(error).__name__}: {error}")
        return EXIT_FAILED
    return EXIT_OK


def _receive(adapter: NodeAdapter, site: Site, plugins: Plugins, sender: _Sender) -> None:
    if not isinstance(adapter, MovingAdapter):
        raise Refused(f"{site.batch.system} cannot hold a node for a guest of another node's job")
    told = Told.read(sender.told())
    _require_able(told, site)
    with job_lock(site.paths, told.job, 0):
        if find(site.paths, told.job):
            raise Refused(f"job {told.job} has something on {told.to} already")
        try:
            job = adapter.receive(told.job, told.nodes, told.leaves, told.to)
            _start(job, adapter, site, plugins, told.guests, sender)
        except (Exception, LeftAlone):
            if not sender.awaits:
                for fault in tell_ended(site, plugins, release_job(site.paths, told.job)):
                    _log.warning("%s", fault)
                adapter.let_go(told.job, told.to)
            raise


def _start(
    job: BatchJob,
    adapter: NodeAdapter,
    site: Site,
    plugins: Plugins,
    guests: Sequence[ArrivingGuest],
    sender: _Sender,
) -> None:
    arrive = functools.partial(sender.arrive, [guest.uuid for guest in guests], site)
    arriving = [Migration(guest, arrive) for guest in guests]
    mine = plan.attempt_of(job, plan.job_user(job.owner, site))
    with log.opened(log.Log(site.paths, mine, parse(site.log.level))):
        _log.info("guests of job %s are to come here from another node", job.id)
        start_job(job, site, plugins, adapter, arriving=arriving)
        _log.info("%s: here", ", ".join(guest.hostname for guest in guests))


def _require_able(told: Told, site: Site) -> None:
    if not virtiofs_daemon.saves():
        raise Refused(f"the virtiofsd of {told.to} gives QEMU no state to move")
    here = {"vTorque": __version__, **hypervisor.versions(site.node.libvirt_uri)}
    for name, there in told.versions.items():
        if here.get(name) != there:
            raise Refused(f"{told.to} has another {name}: {here.get(name)}, not {there}")
