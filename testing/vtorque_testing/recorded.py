"""Start jobs without root on a recorded node: a directory and the topology of a recorded machine.

Doubles replace only the parts that need root or a hypervisor:

- Domains and packet filters are files.
- Guests are ready immediately.
- Processes are not bound to CPUs, because the recorded CPUs do not exist on this host.

Only the job's processes see the node's /dev/shm, recorded sysfs and recorded tools, through bind
mounts. Without root, bind mounts require user namespaces (user_namespaces(7)).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import pwd
import re
import shutil
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock
from xml.etree import ElementTree

from vtorque_core.api import hooks, vm_options
from vtorque_core.api.batch_system import BatchJob, JobState, NodeAdapter, Outcome, PeerGuest
from vtorque_core.api.guest_context import ContextItem
from vtorque_core.api.guest_driver import GuestDriver
from vtorque_core.api.strategies import GuestType
from vtorque_core.api.values import FileData
from vtorque_core.base import hypervisor
from vtorque_core.base.errors import HostFault
from vtorque_core.base.locks import job_lock, node_lock
from vtorque_core.config import site_config, site_file
from vtorque_core.config.plugins import BUILTIN, Plugins, installed_plugins, owner
from vtorque_core.config.request import Request
from vtorque_core.node.end.teardown import release_job
from vtorque_core.node.start import start_order as start
from vtorque_core.plan.placement import node_hardware
from vtorque_core.plan.placement.topology import parse
from vtorque_core.records.reading import LEASE, SPARE, journals, read, reconstruct
from vtorque_core.resources import netfilter
from vtorque_core.resources.disk import MountResource
from vtorque_core.resources.domain import Domain
from vtorque_core.resources.kinds import core_kind
from vtorque_testing import recorded_root
from vtorque_testing.faults import ChildResult, NamedObjects, around_create, run_in_child, survive
from vtorque_testing.planned import PlannedNode
from vtorque_testing.recorded_image import put_image
from vtorque_testing.recorded_mounts import cover, user_namespace
from vtorque_testing.watched import named_objects, state


class ReadyPlugins(Plugins):
    """Plugins whose drivers report a guest as ready at once: recorded nodes boot no guests."""

    def guest_type(self, name: str) -> GuestType:
        """Return the real guest type, with a driver that does not wait."""
        real = super().guest_type(name)
        return replace(real, driver=functools.partial(_without_wait, real.driver))


def _without_wait(driver: Callable[[], GuestDriver]) -> GuestDriver:
    real = driver()
    for wait in {"await_ready", "await_warm"} & {*dir(real)}:
        setattr(real, wait, lambda *_: None)
    return real


_installed = functools.cache(installed_plugins)

# Modules that a start imports late. Importing them once here halves the time of each start.
_LATE = (
    "cryptography.hazmat.primitives.asymmetric.ed25519",
    "cryptography.hazmat.primitives.serialization",
    "pycdlib",
    "vtorque_linux_guest.boot.hardware",
    "vtorque_linux_guest.boot.seed_contents",
)


def load(only: Collection[str] | None = None) -> Plugins:
    """Return the installed plugins, and import the modules that only nodes use.

    Nodes also check who can write the plugins' files; this function does not.

    Args:
        only: names of the plugins to load; None: all.
    """
    plugins = ReadyPlugins()
    plugins.register(BUILTIN, vm_options, "vtorque-core")
    for name, points in _installed().items():
        if only is None or name in only:
            for point in points:
                plugins.register(name, point.load(), owner(point))
    for kind in plugins.guest_types().values():
        kind.driver()  # imported here once, and not in each of the job's processes
    for late in _LATE:
        with contextlib.suppress(ImportError):
            importlib.import_module(late)
    return plugins


_create_domain = hypervisor.create_domain
_destroy_domain = hypervisor.destroy_domain
_resume_domain = hypervisor.resume_domain


@dataclass(frozen=True)
class NodeDoubles:
    """Doubles of the calls that need a hypervisor or root.

    Files replace domains, QEMU's channel sockets and mounts. A domain's file is in the directory
    ``domains`` and contains the domain XML. If the site uses another ``test://`` URI than
    :data:`URI`, a domain of libvirt's test driver is created as well.
    """

    domains: Path

    def create_domain(self, uri: str, xml: str, *, paused: bool) -> None:
        """Create the domain. Create a regular file for each channel's socket."""
        self._ask_libvirtd()
        root = ElementTree.fromstring(xml)  # noqa: S314 - our own
        for source in root.iterfind("./devices/channel/source"):
            if source.get("path"):
                Path(str(source.get("path"))).touch()
        if uri != URI:
            of_driver = re.sub('^<domain type="[a-z]+"', '<domain type="test"', xml)
            _create_domain(uri, of_driver)  # this driver cannot create a paused one
        (self.domains / f"{root.findtext('name')}.xml").write_text(xml, encoding="utf-8")

    def adopt_domain(self, _uri: str, uuid: str, *_: object) -> None:
        """Check that the domain of a warm guest exists. Raises HostFault otherwise."""
        self._ask_libvirtd()
        if not any(uuid in file.read_text("utf-8") for file in self.domains.glob("*.xml")):
            raise HostFault("the domain does not exist")

    def resume_domain(self, uri: str, uuid: str, *_: object) -> None:
        """Resume the domain. Raises HostFault if it does not exist."""
        self.adopt_domain(uri, uuid)
        if uri != URI:
            _resume_domain(uri, uuid)

    def end_domain(self, domain: Domain) -> None:
        """Remove the domain."""
        self._ask_libvirtd()
        self.destroy_domain(domain.uri, domain.uuid)

    def destroy_domain(self, uri: str, uuid: str, *_: object) -> None:
        """Remove the domain, if it exists."""
        if uri != URI:
            _destroy_domain(uri, uuid)
        for file in self.domains.glob("*.xml"):
            with contextlib.suppress(FileNotFoundError):  # another guest, which is removed now
                if f"<uuid>{uuid}</uuid>" in file.read_text("utf-8"):
                    file.unlink()

    def _ask_libvirtd(self) -> None:
        if (self.domains / DOWN).exists():
            raise HostFault("libvirtd does not answer")

    def mount(self, mount: MountResource) -> None:
        """Create a marker file in the mount point, instead of the mount.

        A real mount would be in the mount namespace of the process that starts the job. It would
        end when that process is killed, so that no test could check its release.
        """
        Path(mount.target, _MOUNTED).write_text(
            f"{mount.fstype} {mount.source}\n", encoding="utf-8"
        )

    def unmount(self, mount: MountResource) -> None:
        """Remove the marker file."""
        Path(mount.target, _MOUNTED).unlink(missing_ok=True)


URI = "test:///default"  # for site configs; libvirt's driver itself is not used
DOWN = "libvirtd-is-down"  # while this file exists beside the domains, they are unreachable

_COMMANDS = ("reset", "drivers_probe", "unbind")  # sysfs does not store values written to these

_MOUNTED = ".mounted"
_NOT_MADE = (LEASE, SPARE)  # kinds of records that create nothing; other jobs' starts read them

_NFT = """#!/bin/sh
# Stands for nft(8): a file for each table.
while read -r word family name rest; do
  case $word in
    table) : > "{top}/tables/$family-$name" ;;
    delete) rm -f "{top}/tables/$name-$rest" ;;
  esac
done
"""


class NoBatch(NodeAdapter):
    """Double of a batch system's node adapter."""

    def job(self, argv: Sequence[str], environ: Mapping[str, str]) -> BatchJob:
        """Raise NotImplementedError, because tests create the job directly."""
        raise NotImplementedError

    def finish(self, job: BatchJob, outcome: Outcome, reason: str, *, hook_waits: bool) -> int:
        """Return exit status 0."""
        return 0

    def job_states(self, ids: Sequence[str]) -> Mapping[str, JobState]:
        """Return ``UNKNOWN`` for each job."""
        return dict.fromkeys(ids, JobState.UNKNOWN)

    def context(self, job: BatchJob, guests: Sequence[PeerGuest]) -> Iterable[ContextItem]:
        """Return no items."""
        return ()


@dataclass(frozen=True)
class RecordedNode:
    """A simulated node for tests: a directory, and the topology of a recorded machine.

    Create it with :meth:`make`.

    Args:
        top: the node's directory.
        machine: output of ``virsh capabilities`` on the recorded machine.
        plugins: the node's plugins.
        site: the node's site config.
        covers: bind mounts in the job's processes, as target and source. The targets must
            include /dev/shm and the program nft.
        share: the batch system's allocation for a job: fields of BatchJob.
        doubles: class, method name and replacement of each method to replace.
    """

    top: Path
    machine: str
    plugins: Plugins
    site: site_config.Site
    covers: Mapping[Path, Path] = field(default_factory=dict)
    share: Mapping[str, Any] = field(default_factory=dict)
    doubles: Sequence[tuple[type, str, Callable[..., Any]]] = ()

    @classmethod
    def make(
        cls,
        top: Path,
        machine: str,
        plugins: Plugins,
        *,
        tables: Mapping[str, Mapping[str, Any]] | None = None,
        sysfs: Callable[[Path], object] | None = None,
        tools: Mapping[str, str] | None = None,
        share: Mapping[str, Any] | None = None,
    ) -> RecordedNode:
        """Create the node with one image, ``recorded``.

        Args:
            top: a directory that does not exist yet.
            machine: output of ``virsh capabilities``.
            plugins: from :func:`load`.
            tables: tables of the site config, in addition to the node's own.
            sysfs: creates a sysfs tree below the given path.
            tools: contents of programs that replace system tools, by name.
            share: the batch system's allocation for a job: fields of BatchJob.
        """
        user_namespace()  # before the node's processes are forked
        data = _tables(top)
        for name, table in (tables or {}).items():
            data[name] = {**data.get(name, {}), **table}
        site = site_config.build(site_file.Raw(top / "vtorque.toml", "", data), plugins, node=True)
        covers = {Path("/dev/shm"): top / "shm"}  # noqa: S108 - its fixed path
        node = cls(top, machine, plugins, site, covers, share or {})
        for path in (
            *(site.paths.state / name for name in ("", "jobs", "journal")),
            *(site.paths.run / name for name in ("", "jobs", "locks", "proof")),
            *(top / name for name in ("domains", "images", "tables", "tools", "shm")),
        ):
            path.mkdir(mode=0o755, parents=True, exist_ok=True)
        site.path.touch()  # processes of the node read it
        if sysfs is not None:
            sysfs(top / "sys")
            covers[Path("/sys")] = top / "sys"
        for name, text in {"nft": _NFT, **(tools or {})}.items():
            (top / "tools" / name).write_text(text.replace("{top}", str(top)), encoding="utf-8")
            (top / "tools" / name).chmod(0o755)
            covers[_tool_path(name)] = top / "tools" / name
        site.paths.secret.touch(0o600)
        site.paths.secret.write_bytes(bytes(64))
        with node_lock(site.paths):
            pass
        put_image(site.images.pool)
        return node

    @property
    def planned(self) -> PlannedNode:
        """This node as a :class:`vtorque_testing.planned.PlannedNode`, which has no files."""
        return PlannedNode(self.plugins, self.site, parse(self.machine))

    def job(
        self,
        pairs: Mapping[str, str],
        job_id: str = "1",
        files: Mapping[str, FileData] | None = None,
    ) -> BatchJob:
        """Return a job with these ``-vm`` keys, owned by a user of this host."""
        blob = Request(tuple(pairs.items()), files=dict(files or {})).encode()
        values = {"node": "n1", "nodes": ("n1",), **self.share}
        return BatchJob(id=job_id, owner=_owner(), blob=blob, **values)

    def start(self, job: BatchJob, last: int | None = None, **fault: Any) -> ChildResult:
        """Start the job in a child process, and kill the process at step number ``last``.

        Each call of :func:`vtorque_core.records.journal.step` is a step. ``fault``: arguments of
        :func:`vtorque_testing.faults.run_in_child`.
        """
        return run_in_child(lambda: self.start_in_process(job), last, **fault)

    def release(self, job_id: str = "1") -> None:
        """Release the job in another process. Raises AssertionError if a resource remains."""
        run = run_in_child(lambda: self.release_in_process(job_id))
        assert not run.error, f"{run.kind}: {run.error}"

    def domains(self) -> list[str]:
        """Return the XML of all running guests."""
        return [path.read_text() for path in sorted((self.top / "domains").iterdir())]

    def named_objects(self, step: str) -> NamedObjects | None:
        """Return the host objects that the newest journal record names, and their present state.

        Omits objects in the recorded node's own directories. Returns None unless ``step`` is
        ``after record KIND``. At this step, the journal lists a resource of kind KIND, and the
        resource's ``create()`` has not run. Therefore, the objects need not exist.
        """
        before, _, kind = step.partition("after record ")
        if before or not kind or kind in _NOT_MADE:
            return None
        found = [r for path in journals(self.site.paths) for r in read(path).open if r.kind == kind]
        record = max(found, key=lambda r: (r.time, r.seq))
        kinds = {c.item.kind: c.item for c in self.plugins.collect(hooks.vtorque_resources)}
        names = list(
            named_objects(reconstruct(record, core_kind(record.kind) or kinds.get(record.kind)))
        )
        blind = "" if names else ", ".join(sorted(record.args)) or "no fields"
        mine = [Path(self.top), *self.covers]
        outside = [
            (what, name, state(what, name))
            for what, name in names
            if what not in ("double", "link" if Path("/sys") in self.covers else "")
            and not (what == "path" and any(Path(name).is_relative_to(top) for top in mine))
        ]
        return NamedObjects(kind, tuple(outside), blind)

    def observe(self) -> dict[str, object]:
        """Return the type, link target and content of each file of the node."""
        paths = self.site.paths
        lock, state = str(paths.node_lock), str(paths.state)
        top, sysfs = str(self.top), str(self.top / "sys")
        found: dict[str, object] = {}
        for directory, directories, files in os.walk(top):
            if directory == state:
                directories[:] = set(directories) - {paths.kept.name}  # records of ended jobs
            for name in (*directories, *files):
                path = f"{directory}/{name}"
                if path == lock or (directory == state and ".log" in name):
                    continue  # the lock's last holder, and a manager's messages
                is_command = name in _COMMANDS and path.startswith(sysfs)
                with contextlib.suppress(FileNotFoundError):  # a process of the node renamed it
                    found[path[len(top) + 1 :]] = _file(path, is_command)
        return found

    def start_in_process(self, job: BatchJob, *, again: bool = False) -> None:
        """Start the job in this process.

        If ``again`` is true, first release the leftovers of an earlier start, as a prologue does.
        """
        with self.install_doubles():
            self.begin(job, again=again)

    def begin(self, job: BatchJob, *, again: bool = False) -> None:
        """Start the job as in :meth:`start_in_process`, with the doubles already installed."""
        with job_lock(self.site.paths, job.id):
            if again:
                release_job(self.site.paths, job.id, plugins_for=lambda _: self.plugins)
            at_once = replace(job, patience=0.0)  # do not wait for resources in use by other jobs
            start.start_job(at_once, self.site, self.plugins, NoBatch())

    def release_in_process(self, job_id: str, release_timeout: float = 30) -> None:
        """Release the job in this process. Raises HostFault if a resource remains."""
        with self.install_doubles():
            self.finish(job_id, release_timeout)

    def finish(self, job_id: str, release_timeout: float = 30) -> None:
        """Release the job as in :meth:`release_in_process`, with the doubles already installed."""
        reports = release_job(
            self.site.paths,
            job_id,
            plugins_for=lambda _: self.plugins,
            release_timeout=release_timeout,
            deadline=30,
        )
        lines = [line for report in reports for line in report.lines()]
        if lines:
            raise HostFault("\n".join(lines))

    @contextlib.contextmanager
    def install_doubles(self) -> Iterator[None]:
        """Install the doubles in this process and its children."""
        known = parse(self.machine)
        doubles = NodeDoubles(self.top / "domains")
        cover(self.covers)
        with contextlib.ExitStack() as stack:
            for owner, name, value in (
                (hypervisor, "create_domain", doubles.create_domain),
                (hypervisor, "adopt_domain", doubles.adopt_domain),
                (hypervisor, "destroy_domain", doubles.destroy_domain),
                (hypervisor, "resume_domain", doubles.resume_domain),
                (Domain, "release", _method(doubles.end_domain)),
                (Domain, "retry_seconds", 0.0),  # no other process creates the domain
                (MountResource, "create", _method(doubles.mount)),
                (MountResource, "release", _method(doubles.unmount)),
                (MountResource, "retry_seconds", 0.0),
                (netfilter, "add_ifb", lambda name: (self.top / "tables" / name).touch()),
                (netfilter, "remove_ifb", lambda name: (self.top / "tables" / name).unlink(True)),
                (node_hardware, "topology", lambda _uri: known),
                (hypervisor, "qemu_uid", lambda _user: os.geteuid()),
                (os, "sched_setaffinity", lambda *_: None),
                (os, "fsync", lambda _: None),  # tests simulate no power failure
                *self.doubles,
                *recorded_root.doubles(),
            ):
                stack.enter_context(mock.patch.object(owner, name, value))
            yield


@dataclass(frozen=True)
class RecordedJob:
    """A job of a recorded node, as a :class:`vtorque_testing.faults.Rig`.

    ``processes`` lists the job's processes, see :func:`vtorque_testing.faults.orphans`.
    """

    node: RecordedNode
    job: BatchJob
    processes: Callable[[], Sequence[str]]

    def start(self, last: int | None = None) -> ChildResult:
        """Start the job in a process that is killed at step number ``last`` (None: never).

        Each call of :func:`vtorque_core.records.journal.step` is a step. If ``last`` is None,
        :attr:`ChildResult.noted` has a :class:`NamedObjects` for each journal record that the start
        writes, except those of leases and of claimed warm guests.
        """
        if last is not None:
            return self.node.start(self.job, last)
        return self.node.start(self.job, note=self.node.named_objects)

    def release(self) -> None:
        """Release the job."""
        self.node.release(self.job.id)

    def observe(self) -> dict[str, object]:
        """Return the node's files and the job's processes."""
        return {**self.node.observe(), "processes": self.processes()}

    def survive(self, wanted: Callable[[str], bool] = around_create) -> list[str]:
        """Kill the process that starts the job at each wanted step; return these steps' names.

        After each kill, release the job and check that nothing is left. Details:
        :func:`vtorque_testing.faults.survive`.
        """
        return survive(self, wanted)


def _file(path: str, is_command: bool) -> tuple[str, str, bytes, int]:
    """Return mode, link target, first bytes and content hash of a file.

    If ``is_command`` is true, the file is one that sysfs executes when it is written. Then its
    content is ignored, because a real sysfs does not store the content.
    """
    mode = os.lstat(path).st_mode
    content = Path(path).read_bytes() if stat.S_ISREG(mode) and not is_command else b""
    link = str(Path(path).readlink()) if stat.S_ISLNK(mode) else ""
    return oct(mode), link, content[:200], hash(content)


def _tables(top: Path) -> dict[str, dict[str, Any]]:
    return {
        "paths": {"state": str(top / "state"), "run": str(top / "run")},
        "node": {"name": "n1", "libvirt_uri": URI, "accel": "tcg", "guest_uids": 0},
        "images": {"pool": str(top / "images")},
        "network": {"kind": "bridge", "source": "br0"},
        "shares": {},
    }


def _tool_path(tool: str) -> Path:
    path = shutil.which(tool, path="/usr/sbin:/usr/bin:/sbin:/bin")
    assert path is not None, f"{tool} is not installed, so it cannot be replaced"
    return Path(path).resolve()


def _method(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that can replace a method of a class, and that calls ``function``.

    ``function`` gets the instance of that class as its first argument.
    """
    return lambda *arguments: function(*arguments)  # noqa: PLW0108


def _owner() -> str:
    """Return the current user's name, or another user's name if the current user is root."""
    ids = [os.getuid()] if os.getuid() else [e.pw_uid for e in pwd.getpwall() if e.pw_uid]
    return pwd.getpwuid(ids[0]).pw_name
