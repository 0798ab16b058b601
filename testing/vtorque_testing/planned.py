"""Plan jobs on a recorded machine, without root, processes or files of a node.

A :class:`PlannedNode` has a site config, plugins and a recorded machine. From the user's input and
with the plugins' hooks, it computes what a node would: requests, guests, leases and domain XML.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from vtorque_core.api import hooks, vm_options
from vtorque_core.api.acquired import Resource
from vtorque_core.api.batch_system import Needs
from vtorque_core.api.claims import Claim, CoreClaim, MemoryClaim, Notice
from vtorque_core.api.guest_context import ContextItem
from vtorque_core.api.guest_driver import GuestDriver
from vtorque_core.api.guest_plan import GuestPlan, JobUser
from vtorque_core.api.host_topology import Topology
from vtorque_core.api.libvirt_domain import Disk, Element, Filesystem
from vtorque_core.api.values import FileData, Image, JobRequest
from vtorque_core.api.vm_options import RAM, VCPUS, VMS_PER_NODE
from vtorque_core.base.errors import Refusal
from vtorque_core.base.names import CONFIG_PATH, JobAttempt, Paths
from vtorque_core.config.plugins import Plugins
from vtorque_core.config.policy import check_share, decide, needs, resolve
from vtorque_core.config.request import Request, make_request, parse_vm
from vtorque_core.config.site_config import Site, build, problems
from vtorque_core.config.site_file import Raw, parse_toml
from vtorque_core.plan.domain.merge import Contributed, merge
from vtorque_core.plan.domain.render import DomainSpec, render
from vtorque_core.plan.guests import PlannedGuest, distance_notices
from vtorque_core.plan.placement.divide_cores import divide
from vtorque_core.plan.placement.ledger import place
from vtorque_core.plan.placement.model import Leases as Leases
from vtorque_core.plan.placement.model import NodeShare as NodeShare
from vtorque_core.plan.placement.model import NoFit as NoFit
from vtorque_core.plan.placement.topology import parse
from vtorque_core.plan.placement.topology import with_default_group as with_default_group
from vtorque_core.records.journal import Journal
from vtorque_core.records.reading import JobHeader
from vtorque_testing.sysfs_tree import DATA

ADA = JobUser("ada", 1000, 1000, (("ada", 1000),), "/home/ada", "/bin/bash")
MICRO = Image("micro", "linux", "micro", "x86_64", "0" * 64)
SCHEMA = "/usr/share/libvirt/schemas/domain.rng"


@dataclass(frozen=True)
class PlannedMachine:
    """A recorded machine: names of the files with its capabilities and its PCI functions."""

    capabilities: str
    sysfs: str = ""

    @property
    def text(self) -> str:
        """Output of ``virsh capabilities`` on the machine."""
        return (DATA / f"{self.capabilities}.xml").read_text(encoding="utf-8")

    @property
    def host(self) -> Topology:
        """Topology of the machine."""
        return parse(self.text)


MACHINES = {
    "one-socket": PlannedMachine("one-socket"),  # 8 cores, no SMT, no huge pages, no KVM
    "smt": PlannedMachine(
        "xeon-2x32-smt"
    ),  # two sockets, SMT, huge pages of 2 MiB, divisible caches
    "four-nodes": PlannedMachine("epyc-4-numa"),  # four NUMA nodes, SMT
    "arm": PlannedMachine("arm-4x32"),  # two sockets of two NUMA nodes, no SMT, pages of 64 KiB
    "gpu": PlannedMachine("xeon-2x32-smt", "gpu-node"),
    "rdma": PlannedMachine("xeon-2x32-smt", "rdma-node"),
    "no-iommu": PlannedMachine("xeon-2x32-smt", "no-iommu"),
    "all-devices": PlannedMachine("xeon-2x32-smt", "all-devices"),
}


def host(name: str) -> Topology:
    """Return the topology of a machine in :data:`MACHINES`."""
    return MACHINES[name].host


def guest_plan(**changes: Any) -> GuestPlan:
    """Return a guest's plan with default values; ``changes`` replaces some of its fields."""
    values: dict[str, Any] = {
        "job": JobAttempt("42.srv", 0, "ada", 1000, "n1"), "index": 0, "rank": 0,
        "guests_per_node": 1, "name": "vt-42.srv.0-n1-0",
        "uuid": "0b1ad9ba-95f3-54cf-8d96-1d6ed3e4ac1f", "hostname": "vn1",
        "vcpus": 1, "ram_mib": 512, "image": MICRO, "user": ADA, "request": JobRequest({}),
        "addresses": (), "peers": (), "state_dir": Path("/s"), "run_dir": Path("/r"),
        "secret": b"x" * 32,
    }  # fmt: skip
    return GuestPlan(**values | changes)


def load_with_core(name: str, *modules: object) -> Plugins:
    """Load the core's options and the modules of one plugin."""
    found = Plugins()
    found.register("core", vm_options, "vtorque-core")
    for module in modules:
        found.register(name, module, f"vtorque-{name} 1.0.0")
    return found


@dataclass(frozen=True)
class PlannedNode:
    """Plugins, their site config and a machine. Create it with :meth:`make`."""

    plugins: Plugins
    site: Site
    host: Topology

    @classmethod
    def make(cls, plugins: Plugins, text: str = "", machine: str | Topology = "smt") -> PlannedNode:
        """Return the node. Raises ConfigError.

        Args:
            plugins: from :func:`load_with_core`, or those of a recorded node.
            text: the site config, in TOML.
            machine: a key of :data:`MACHINES`, or a topology.
        """
        raw = parse_toml(text.encode(), CONFIG_PATH)
        known = host(machine) if isinstance(machine, str) else machine
        return cls(plugins, build(raw, plugins, node=True), known)

    def submit(self, *vm: str, cwd: Path | None = None) -> Request:
        """Return the request that ``vsub`` submits for these ``-vm`` values. Raises Refused."""
        return make_request(parse_vm(vm) or () if vm else (), self.plugins.options(), cwd=cwd)

    def request(self, *vm: str, files: Mapping[str, FileData] | None = None) -> JobRequest:
        """Return the validated request for these ``-vm`` values. Raises Refused.

        ``files`` are the contents of file options, by key.
        """
        request = Request(tuple(parse_vm(vm) or () if vm else ()), dict(files or {}))
        return decide(request, self.site, self.plugins)

    def resolve(self, request: JobRequest) -> JobRequest:
        """Return the request with numbers in place of ``vcpus=job`` and ``ram=job``.

        Raises Refused.
        """
        return resolve(request, self.site, self.plugins)[0]

    def needs(self, *vm: str, asked: Mapping[str, int] | None = None) -> Needs:
        """Return the resources that ``vsub`` requests per node.

        Raises Refused, also if ``asked``, the user's own request for resources, is too small.
        """
        found = needs(self.request(*vm), self.site, self.plugins)
        if asked is not None:
            check_share(found, None, None, asked)
        return found

    def guests(self, request: JobRequest, **changes: Any) -> list[GuestPlan]:
        """Return the plans of a job's guests on this node before placement.

        ``changes`` replaces fields of the plans.
        """
        first = guest_plan(**{
            "vcpus": request[VCPUS], "ram_mib": request[RAM], "host": self.host,
            "guests_per_node": request[VMS_PER_NODE], "request": request,
        } | changes)  # fmt: skip
        several = request[VMS_PER_NODE] > 1
        return [
            replace(
                first, index=index, rank=index, name=f"vt-42.srv.0-n1-{index}",
                hostname=f"vn1-{index}" if several else first.hostname,
            )
            for index in range(request[VMS_PER_NODE])
        ]  # fmt: skip

    def answers(self, guest: GuestPlan) -> list[Claim | Refusal | Notice]:
        """Return the items that the plugins' hook ``vtorque_plan`` yields for a guest."""
        return self._items(hooks.vtorque_plan, guest=guest, site=self.site)

    def place(
        self, *guests: GuestPlan, taken: Leases | None = None, **share: Any
    ) -> list[GuestPlan]:
        """Return the guests as the ledger places them. Raises NoFit.

        Args:
            guests: guests of the job.
            taken: leases of other jobs.
            share: fields of NodeShare, the job's grant. The default is the whole node.
        """
        claims = [
            [CoreClaim("vcpu", g.vcpus), MemoryClaim(g.ram_mib, use="guest"), *self._claims(g)]
            for g in guests
        ]
        given = NodeShare(self.host, **{"exclusive": False, **share})
        answers = divide(claims, given, taken or Leases())
        return [replace(g, placement=at) for g, at in zip(guests, answers, strict=True)]

    def placement_notices(self, guest: GuestPlan) -> list[Notice]:
        """Return a notice for each preference that the placement does not meet."""
        asked = PlannedGuest(guest, cast(GuestDriver, None), tuple(self._claims(guest)))
        return distance_notices(asked, guest.placement)

    def elements(self, guest: GuestPlan) -> list[Element]:
        """Return the plugins' domain elements for a guest."""
        return self._items(hooks.vtorque_render_domain, guest=guest, site=self.site)

    def context(self, guest: GuestPlan) -> list[ContextItem]:
        """Return the plugins' context items for a guest."""
        return self._items(hooks.vtorque_guest_context, guest=guest, site=self.site)

    def pre_boot_resources(self, *guests: GuestPlan) -> list[tuple[Resource, GuestPlan | None]]:
        """Return the resources that plugins acquire until the guests boot, each with its guest.

        No resource is created. The guest is None for a resource of the whole job.
        """
        got: list[tuple[Resource, GuestPlan | None]] = []

        def acquire(
            what: Resource, guest: GuestPlan | None = None, needs: Iterable[int] = ()
        ) -> int:
            got.append((what, guest))
            return len(got)

        job = SimpleNamespace(
            id="42.srv",
            site=self.site,
            guests=guests,
            user=ADA,
            acquire=acquire,
            warn=_ignore_warning,
        )
        self._items(hooks.vtorque_pre_boot, job=job)
        self._items(hooks.vtorque_while_booting, job=job)
        return got

    def domain(self, guest: GuestPlan, **spec: Any) -> str:
        """Return a guest's XML with the plugins' hardware; ``spec`` are fields of DomainSpec."""
        found = self.plugins.collect(hooks.vtorque_render_domain, guest=guest, site=self.site)
        return _render(guest, [Contributed(c.plugin, c.distribution, c.item) for c in found], spec)

    def _claims(self, guest: GuestPlan) -> list[Claim]:
        return [a for a in self.answers(guest) if not isinstance(a, Refusal | Notice)]

    def _items(self, hook: Callable[..., Iterable[Any] | None], **arguments: Any) -> list[Any]:
        return [each.item for each in self.plugins.collect(hook, **arguments)]


def domain(guest: GuestPlan, elements: Iterable[Element], **spec: Any) -> str:
    """Return a guest's XML with these elements; ``spec`` are fields of DomainSpec."""
    return _render(guest, [Contributed("acme", "vtorque-acme 1.0.0", e) for e in elements], spec)


def _render(guest: GuestPlan, found: list[Contributed], spec: Mapping[str, Any]) -> str:
    merged = merge(found)
    sockets = dict.fromkeys(merged.aliases(Filesystem), "/r/fs.sock")
    disks = merged.aliases(Disk).items()
    sockets |= {alias: "/r/disk.sock" for alias, each in disks if each.user_owned}
    return render(DomainSpec(guest, **{"accel": "tcg", **spec}), merged, sockets=sockets)


def site(**tables: Mapping[str, Any]) -> Site:
    """Return a site config with these tables and without plugins. Raises ConfigError."""
    found = {
        name: {key: str(v) if isinstance(v, Path) else v for key, v in table.items()}
        for name, table in tables.items()
    }
    return build(Raw(CONFIG_PATH, "", found), load_with_core("none"))


def lease(paths: Paths, job: JobAttempt, claims: Sequence[Sequence[Claim]], on: NodeShare) -> None:
    """Lease these claims to a job's guests in the ledger of ``paths``. Raises NoFit, HostFault.

    ``on`` describes the node and the job's allocation.
    """
    with Journal.start(paths, JobHeader(job, "local")) as journal:
        place(journal, claims, on, paths)


def config_problems(plugins: Plugins, text: str) -> list[str]:
    """Return the problems of a site config."""
    return problems(parse_toml(text.encode()), plugins)


def check_schema(xml: str) -> None:
    """Validate a domain against libvirt's schema. Raises AssertionError with xmllint's errors.

    Requires xmllint(1) (Debian: libxml2-utils) and libvirt's schemas.
    """
    assert shutil.which("xmllint"), "xmllint is missing. As root: apt-get install libxml2-utils"
    assert Path(SCHEMA).exists(), f"{SCHEMA} is missing. As root: apt-get install libvirt0"
    command = ["xmllint", "--noout", "--relaxng", SCHEMA, "-"]
    done = subprocess.run(
        command, input=xml.encode(), capture_output=True, check=False, timeout=180
    )
    assert done.returncode == 0, done.stderr.decode()


def _ignore_warning(_text: str) -> None:
    """Ignore a warning for the job's user."""
