"""The boot source "migration": receive a running guest from another node. Runs as root.

The source node sends one line that describes the guests. This process acquires their resources and
answers with each guest's XML for this node. It answers again when all guests run on this node.

If the source node disconnects before the first answer, no guest was sent, and this process releases
all resources. If the source node disconnects later, this process releases nothing, because only the
source node can determine which node owns a guest (:mod:`vtorque_survive.migration`).
"""

from __future__ import annotations

import functools
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vtorque_core.api import HostFault, VtorqueError
from vtorque_core.api.boot_source import Boot, BootSource, Identity
from vtorque_core.api.children import wait_readable
from vtorque_core.api.node_job import ReceivingNode
from vtorque_survive import domains

_MOST, _TELLS = 1 << 20, 30.0  # bytes of the sender's line, and seconds for it
_ARRIVES = 3660.0  # seconds for a guest: more than for the sender, less than for the core
_POLL = 0.05  # seconds; libvirt's events would need its event loop
log = logging.getLogger(__name__)


class SenderGone(BaseException):
    """Error if the source node has disconnected.

    This process then releases nothing, because a guest may be on this node.
    """


@dataclass(frozen=True)
class ArrivingGuest(Identity):
    """A guest on the source node: its directories on that node and its libvirt XML."""

    state_dir: Path
    run_dir: Path
    xml: str


@dataclass(frozen=True)
class JobDescription:
    """The source node's description of the job and its guests.

    Attributes:
        job: The job's id.
        nodes: The job's nodes after the migration, in rank order.
        leaves: The source node, which the guests leave.
        to: The destination node.
        versions: The source node's versions of libvirt and QEMU.
    """

    job: str
    nodes: tuple[str, ...]
    leaves: str
    to: str
    versions: Mapping[str, str]
    guests: tuple[ArrivingGuest, ...]

    @classmethod
    def read(cls, line: bytes) -> JobDescription:
        """Parse the line in which the source node describes the job."""
        try:
            told: dict[str, Any] = json.loads(line)
            guests = tuple(_parse_guest(guest) for guest in told.pop("guests"))
            nodes = tuple(map(str, told.pop("nodes")))
            versions = {str(name): str(each) for name, each in told.pop("versions").items()}
            if wrong := [name for name, value in told.items() if not isinstance(value, str)]:
                raise ValueError(f"{wrong[0]} is not a string")
            found = cls(nodes=nodes, versions=versions, guests=guests, **told)
            if found.to not in nodes:
                raise ValueError(f"node {found.to!r} is not one of the job's nodes")
            if not guests:
                raise ValueError("the list of guests is empty")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise HostFault(f"invalid request from the source node: {error}") from None
        return found


def _parse_guest(guest: dict[str, Any]) -> ArrivingGuest:
    values: dict[str, Any] = {name: str(value) for name, value in guest.items()}
    values["leased"] = tuple((str(pool), str(item)) for pool, item in guest["leased"])
    values["attempt"] = int(guest["attempt"])
    values |= {name: Path(values[name]) for name in ("state_dir", "run_dir")}
    return ArrivingGuest(**values)


class _Sender:
    def __init__(self, requests: int, answers: int) -> None:
        self._requests, self._answers = requests, answers
        self._ready: dict[str, str] = {}
        self._lock = threading.Lock()
        self.awaits = False

    def read_description(self) -> bytes:
        """Return the line in which the source node describes the job."""
        said, until = bytearray(), time.monotonic() + _TELLS
        while not said.endswith(b"\n"):
            left = until - time.monotonic()
            data = (
                os.read(self._requests, 1 << 16) if wait_readable([self._requests], left) else b""
            )
            said += data
            if not data or len(said) > _MOST:
                raise HostFault("the source node did not send its request in time")
        return bytes(said)

    def send_answer(self, **what: Any) -> None:
        """Send an answer to the source node.

        Raises:
            SenderGone: If the source node has disconnected.
        """
        try:
            os.write(self._answers, json.dumps(what).encode() + b"\n")
        except OSError:
            raise SenderGone from None

    def request_guest(
        self,
        of: Collection[str],
        node: ReceivingNode,
        uuid: str,
        xml: str,
        failed: threading.Event,
        filter_nics: Callable[[], None] = lambda: None,
    ) -> None:
        """Request the guest ``uuid`` from the source node. Return when the guest runs here.

        One thread per guest calls this, and waits for the other threads. The last thread sends one
        request for all guests in ``of`` (UUIDs). Calls ``filter_nics`` before the guest runs here.

        Raises:
            SenderGone: If the source node disconnects, or after an hour, because a node that lost
                power never closes its connection.
        """
        self._require_sender(0.0)
        with self._lock:
            self._ready[uuid] = xml
            if self._ready.keys() == set(of):
                self.awaits = True
                self.send_answer(xml=self._ready)
        ready, until = time.monotonic() + node.start_timeout, time.monotonic() + _ARRIVES
        while not self.awaits or (state := domains.domain_state(node.uri, uuid)) != "runs":
            if self.awaits and state == "still":
                with suppress(HostFault):  # libvirt has not created the tap devices
                    filter_nics()
            self._require_sender(_POLL)
            if not self.awaits and (failed.is_set() or time.monotonic() >= ready):
                raise HostFault("another guest of the job was not prepared in time")
            if time.monotonic() >= until:
                raise SenderGone

    def _require_sender(self, seconds: float) -> None:
        if wait_readable([self._requests], seconds) and not os.read(self._requests, 1):
            raise SenderGone


@dataclass(frozen=True)
class Migration(BootSource):
    """A guest that migrates from another node, as a boot source."""

    guest: ArrivingGuest
    arrive: Callable[[str, str, threading.Event, Callable[[], None]], None]

    name = "migration"
    brings_disk = True
    remote = True

    @property
    def identity(self) -> Identity:
        """The guest's identity, which does not change."""
        return self.guest

    def start(self, boot: Boot) -> None:
        """Send the guest's XML for this node to the source node. Wait until the guest runs."""
        xml = boot.adapt_xml(self.guest.xml, self.guest.state_dir, self.guest.run_dir)
        self.arrive(self.guest.uuid, xml, boot.failed, boot.filter_nics)

    def await_ready(self, boot: Boot) -> None:
        """Wait until the guest answers, and set its clock."""
        boot.await_ready()
        boot.set_clock()


def receive_guests(node: ReceivingNode) -> None:
    """Receive guests from another node, and send errors to that node."""
    sender = _Sender(node.requests, node.answers)
    try:
        told = JobDescription.read(sender.read_description())
        arrive = functools.partial(
            sender.request_guest, [guest.uuid for guest in told.guests], node
        )
        node.require_versions(told.to, told.versions)
        where = (told.job, told.nodes, told.leaves, told.to)
        sources = [Migration(guest, arrive) for guest in told.guests]
        node.start(*where, sources, keeps=lambda: sender.awaits)
        sender.send_answer(here=True)
    except SenderGone:
        raise HostFault("the source node has disconnected") from None
    except Exception as error:
        known = isinstance(error, VtorqueError)
        with suppress(SenderGone):
            sender.send_answer(failed=str(error) if known else f"{type(error).__name__}: {error}")
        raise
