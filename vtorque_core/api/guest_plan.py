"""The public API that a plugin's acting module imports. It acts as root on the node.

``vsub`` never imports this module. A plugin asks (claims, elements, context items, resources);
the core decides, acquires and releases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, TypeVar

from vtorque_core.api import Image, JobRequest, Option
from vtorque_core.api_claims import (
    CacheClaim,
    Claim,
    CoreClaim,
    MemoryClaim,
    Notice,
    Placement,
    PoolClaim,
    RamClaim,
)
from vtorque_core.api_topology import CacheBank, NumaNode, Topology
from vtorque_core.errors import ConfigError, HostFault, Refusal, Refused
from vtorque_core.names import Paths, derive
from vtorque_core.tools import NOBODY, alone, guarded, run_tool
from vtorque_core.trust import require_root_owned, require_secret

__all__ = [
    "NOBODY",
    "Address",
    "CacheBank",
    "CacheClaim",
    "Claim",
    "ConfigError",
    "CoreClaim",
    "EndedJob",
    "GuestPlan",
    "HealthCheck",
    "HealthResult",
    "HostFault",
    "Image",
    "JobUser",
    "MemoryClaim",
    "NodeJob",
    "Notice",
    "NumaNode",
    "Placement",
    "PoolClaim",
    "RamClaim",
    "Refusal",
    "Refused",
    "Resource",
    "Share",
    "Site",
    "Topology",
    "alone",
    "derive",
    "guarded",
    "lacks",
    "require_root_owned",
    "require_secret",
    "run_tool",
    "unjournalled",
]

T = TypeVar("T")
S = TypeVar("S")

# -- what a plugin sees of the job ------------------------------------------------------------


@dataclass(frozen=True)
class JobUser:
    """The job's owner as the node's user database has it. ``groups``: (name, gid), primary first.

    ``subordinate_id`` is the host id that root inside a guest of this user is mapped to.
    """

    name: str
    uid: int
    gid: int
    groups: tuple[tuple[str, int], ...]
    home: str
    shell: str
    subordinate_id: int = 2147000000


@dataclass(frozen=True)
class Address:
    """One guest NIC: assigned, never discovered.

    ``ip`` is None with DHCP, and where the NIC has no address (``dhcp`` is then False). ``prefix``
    is the network's length; ``gateway`` and ``dns`` may be empty. ``network``: empty for
    ``[network]``, whose NIC is the first, else the name of ``[networks.<name>]``; only the first
    takes a default route and name servers from DHCP. ``mtu`` in bytes, None: the network's own.
    ``metric`` of the default route, None: the guest's own choice. ``filtered``: the node drops
    what the guest sends with another MAC, or another source address than ``ip``.
    """

    mac: str
    ip: str | None = None
    prefix: int = 24
    gateway: str | None = None
    dns: tuple[str, ...] = ()
    network: str = ""
    mtu: int | None = None
    metric: int | None = None
    dhcp: bool = True
    filtered: bool = True


@dataclass(frozen=True)
class Share:
    """A host directory that every guest gets: one ``[shares.<name>]`` table of the site config.

    Placeholders are expanded. ``source`` is a host directory (virtiofs) or ``server:/export``
    (nfs); ``target`` is where it appears in the guest. ``user_owned``: the source must belong to
    the job's user.
    """

    name: str
    source: str
    target: str
    kind: Literal["virtiofs", "nfs"] = "virtiofs"
    readonly: bool = False
    user_owned: bool = False


class Site(Protocol):
    """The site config as a plugin may see it: its own settings, typed, and vTorque's paths."""

    @property
    def paths(self) -> Paths:
        """vTorque's own directories."""
        ...

    @property
    def path(self) -> Path:
        """The config file, for a process of the plugin's own that reads it again."""
        ...

    def __getitem__(self, settings: type[S]) -> S:
        """Return the plugin's settings: ``site[Settings]``."""
        ...


@dataclass(frozen=True)
class GuestPlan:
    """One guest of the job on this node, validated; all hooks get it.

    Args:
        name: libvirt domain name; ``uuid`` its UUID, ``hostname`` what the guest calls itself.
        index: of the guest on this node, from 0; ``rank``: in the whole job, from 0.
        guests_per_node: how many guests the job has on each node.
        ram_mib: guest RAM in MiB.
        request: ``guest[OPTION]`` reads it.
        state_dir, run_dir: this guest's own root-owned directories, on disk and in memory.
        peers: (hostname, ip) of all guests of the job in rank order, this one included, in the
            first network.
        aliases: (``<hostname>-<network>``, hostname, ip) of the same guests in the others.
        secret: derived for this job and attempt only; the same on all its nodes.
        placement: the ledger's answer; empty while claims are being made.
        shares: host directories this guest gets, in the site config's order.
        ntp: time servers, names or addresses; empty: the image's own choice.
        qemu_uid: the host user that QEMU runs as; files made for QEMU must be theirs to read.
        host: the node's NUMA nodes, cores and caches; without ``nodes`` on a front end.
        supports: names of the context items that the guest can apply, for a plugin that can do
            without; any other item refuses the job.
    """

    job_id: str
    attempt: int
    node: str
    index: int
    rank: int
    guests_per_node: int
    name: str
    uuid: str
    hostname: str
    vcpus: int
    ram_mib: int
    image: Image
    user: JobUser
    request: JobRequest
    addresses: tuple[Address, ...]
    peers: tuple[tuple[str, str], ...]
    state_dir: Path
    run_dir: Path
    secret: bytes = field(repr=False)
    placement: Placement = field(default_factory=Placement)
    shares: tuple[Share, ...] = ()
    ntp: tuple[str, ...] = ()
    qemu_uid: int = 0
    aliases: tuple[tuple[str, str, str], ...] = ()
    host: Topology = field(default_factory=Topology, repr=False)
    supports: frozenset[str] = field(default=frozenset(), repr=False)

    def __getitem__(self, option: Option[T]) -> T:
        """Return the value of an option for this job."""
        return self.request[option]

    def leased(self, pool: str) -> tuple[str, ...]:
        """Return the items of a pool that this guest got; empty if it asked for none."""
        return tuple(self.placement.leased.get(pool, ()))


def lacks(
    guest: GuestPlan, what: str, *, option: Option[Any], required: bool, where: str, fix: str
) -> Refusal | Notice:
    """Answer a wish that this node cannot fulfil, from ``vtorque_plan``.

    Args:
        guest: whose wish it is.
        what: the missing capability, as in "node n1 has no <what>".
        option: the ``-vm`` key that asks for it.
        required: the site's word: refuse the job, or run it without and say so.
        where: the key that says which: ``"[plugin.acme-fpga] required"``.
        fix: what the admin can do, or the user.
    """
    key, value = option.key, option.show(guest[option])
    if required:
        message = f"node {guest.node} has no {what}"
        return Refusal(message, key=key, value=value, where=f"{where} = true", fix=fix)
    return Notice(f"runs without {key}={value}: node {guest.node} has no {what}; {fix}")


# -- resources --------------------------------------------------------------------------------


def unjournalled(default: Any = None) -> Any:
    """Declare a resource field that only ``create()`` needs: contents, XML, secrets.

    It is not written to the journal; ``release()`` sees the default.
    """
    return field(default=default, repr=False, metadata={"journal": False})


class Resource:
    """Anything acquired that must be released: subclass as a frozen dataclass of JSON values.

    ``job.acquire(resource)`` journals the record, then calls :meth:`create`. Both run as root on
    the node. :meth:`release` runs in another process from the journalled fields alone, with no
    plan and no site config; it must succeed when called twice and after a half-done create.
    Tuples, bools, ints, floats, strings and None are the JSON values allowed (lists come back as
    tuples).
    """

    kind: ClassVar[str]
    """Unique over all distributions, e.g. ``"acme-shell"``."""

    scope: ClassVar[Literal["job", "node"]] = "job"
    """``"node"``: shared; created by the first job, released with the last open record."""

    volatile: ClassVar[bool] = True
    """Gone after a reboot: ``release()`` is then skipped."""

    def create(self) -> None:
        """Acquire it. Raises HostFault (or Refused) with what is wrong."""
        raise NotImplementedError

    def release(self) -> None:
        """Give it back. Raises HostFault if that cannot be done now: the reaper tries again."""
        raise NotImplementedError

    def lost(self) -> bool:
        """Return whether it is gone although a record says that it is there: a killed daemon.

        Asked when another job acquires a node-wide one; it is then released and created again.
        """
        return False


class NodeJob(Protocol):
    """The running job as an action hook sees it, once per job and node, as root."""

    @property
    def id(self) -> str:
        """The batch system's job id."""
        ...

    @property
    def user(self) -> JobUser:
        """The job's owner."""
        ...

    @property
    def site(self) -> Site:
        """The site config."""
        ...

    @property
    def guests(self) -> Sequence[GuestPlan]:
        """This node's guests, placed."""
        ...

    @property
    def deadline(self) -> float:
        """The one deadline of the start, in ``time.monotonic()`` seconds."""
        ...

    def acquire(
        self, resource: Resource, guest: GuestPlan | None = None, needs: Iterable[int] = ()
    ) -> int:
        """Journal ``resource``, fsync, create it; return the record's number for ``needs``."""
        ...

    def warn(self, text: str) -> None:
        """Tell user and admin, once, what the job has to do without: one line, no secrets.

        The user gets it with the job's first errors, as a Notice; the admin also in syslog.
        """
        ...


@dataclass(frozen=True)
class EndedJob:
    """What teardown knows: only what the journal says. ``guests`` are libvirt domain names."""

    id: str
    attempt: int
    owner: str
    guests: tuple[str, ...]
    paths: Paths


# -- doctor -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class HealthResult:
    """One line of ``vtorque doctor``. ``fix`` says what to do when not ok."""

    status: Literal["ok", "warning", "failed"]
    message: str
    fix: str = ""


@dataclass(frozen=True)
class HealthCheck:
    """A named check for ``vtorque doctor``; ``check`` runs as the calling user, maybe root."""

    name: str
    check: Callable[[Site], Iterable[HealthResult]]
