"""Driver for the site's own hosts: libvirt on this host or, with ``qemu+ssh``, on another.

Options:

- ``uri`` (default ``qemu:///system``) and ``network`` (``default``) of libvirt.
- ``images``: directory of the images and of the machines' files, on libvirt's host.
- ``pool``: vTorque's image pool, if machines boot from its images. The path must be the same on
  this host and on libvirt's host.
- ``secrets``: cloud-init file that only its owner can read.
- ``most``: maximum number of machines.
- ``accel``: ``kvm``, or ``qemu`` for emulation.
- ``timeout``: seconds (60).

A machine is a transient domain, which disappears when it ends. Its disk is an overlay in the
storage pool ``vtorque-pool``, with the machine's other files. libvirt makes QEMU's user the owner
of these files, but not of the images. The domain's metadata has the tags. A disk without a domain
has no tags, so the names of the files also contain the creation time and a hash of the tag
``cluster``.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import stat
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree
from xml.sax.saxutils import escape, quoteattr

from vtorque_core.api import HostFault, Image, Refused, run_tool
from vtorque_core.live.images import lookup
from vtorque_pool.api import CloudFault, Driver, Machine, MachineOrder, StockOut

try:
    import pycdlib
except ImportError:
    pycdlib = None  # type: ignore[assignment]

_NS = "https://vtorque.org/xmlns/pool/1"
_POOL = "vtorque-pool"
_NAME = re.compile(r"vtorque-pool-[0-9a-f]{8}-([0-9a-f]{8})-[0-9a-f]{8}")
_START = 600.0  # seconds after which a disk without a domain is a leftover
_SYSTEM = 256  # MiB in addition to jobs' memory: Slurm rejects nodes below RealMemory
_FILES = (".qcow2", "-seed.iso", "-kernel", "-initrd")


def driver(options: Mapping[str, str]) -> Driver:
    """Return the driver."""
    most = options.get("most", "")
    return Libvirt(options, int(most) if most else None)


class Libvirt:
    """The libvirt driver."""

    def __init__(self, options: Mapping[str, str], most: int | None) -> None:
        self._uri = options.get("uri", "qemu:///system")
        self._network = options.get("network", "default")
        self._images = options.get("images", "/var/lib/vtorque-pool/images")
        self._accel = options.get("accel", "kvm")
        self._timeout = float(options.get("timeout", "60"))
        self._pool = options.get("pool", "")
        self._secrets = options.get("secrets", "")
        self._most = most

    def create(self, order: MachineOrder) -> Machine:
        """Create the disk, then the domain."""
        if self.quota() == 0:
            raise StockOut(f"{self._uri} has {self._most} machines, the maximum")
        image = self._image(order.image)
        created = time.time()
        name = f"{_prefix(order.cluster)}{int(created):08x}-{uuid.uuid4().hex[:8]}"
        self._prepare()
        try:
            disks, boot = self._disks(name, order, image), self._boot(name, image)
            text = self._xml(name, order, created, boot, disks)
            self._virsh("create", "/dev/stdin", stdin=text.encode())
        except HostFault as error:
            self.destroy(name)
            kind = StockOut if "memory" in str(error).lower() else CloudFault
            raise kind(str(error)) from None
        return Machine(name, order.node, order.shape, created, "running")

    def machines(self, cluster: str) -> list[Machine]:
        """Return the cluster's domains. An old disk without a domain counts as an ended machine."""
        self._prepare()
        disks = [word for word in self._virsh("vol-list", _POOL).split() if "/" not in word]
        names = [n for n in self._virsh("list", "--name").split() if _NAME.fullmatch(n)]
        found = []
        for name in names:
            if (tags := self._tags(name)) and tags["cluster"] == cluster:
                created = float(tags["created"])
                found.append(Machine(name, tags["node"], tags["shape"], created))
        left = {match[0]: int(match[1], 16) for disk in disks if (match := _NAME.match(disk))}
        for name, since in sorted(left.items()):
            lone = name not in names and name.startswith(_prefix(cluster))
            if lone and time.time() - since > _START:
                found.append(Machine(name, "", "", float(since), "ended"))
        return found

    def destroy(self, machine: str) -> None:
        """Destroy the domain and delete its files."""
        if not _NAME.fullmatch(machine):
            return
        self._unless_gone(
            "destroy", machine, gone=("failed to get domain", "domain is not running")
        )
        for end in _FILES:
            gone = ("failed to get vol", "storage pool not found", "failed to get pool")
            self._unless_gone("vol-delete", f"{machine}{end}", "--pool", _POOL, gone=gone)

    def quota(self) -> int | None:
        """Return how many more machines the option ``most`` allows."""
        if self._most is None:
            return None
        names = self._virsh("list", "--name").split()
        return max(0, self._most - sum(bool(_NAME.fullmatch(name)) for name in names))

    def _prepare(self) -> None:
        """Create the storage pool if it is missing. Concurrent calls are safe."""
        if _POOL in self._virsh("pool-list", "--name").split():
            return
        try:
            self._virsh("pool-create-as", _POOL, "dir", "--target", self._images)
        except CloudFault:
            if _POOL not in self._virsh("pool-list", "--name").split():
                raise

    def _image(self, name: str) -> Image:
        if self._pool:
            try:
                return lookup(Path(self._pool), name)
            except (Refused, HostFault) as error:
                raise CloudFault(str(error)) from None
        if not re.fullmatch(r"[\w.+-]+", name, re.ASCII):
            raise CloudFault(f"{name!r} is not a valid name of a file in {self._images}")
        return Image(name, "", "", "", "", disk=Path(self._images, name))

    def _disks(self, name: str, order: MachineOrder, image: Image) -> str:
        if image.disk is None:
            raise CloudFault(f"the image {image.name} has no root disk")
        base, form = escape(str(image.disk)), f"<format type='{image.disk_format}'/>"
        volume = (
            f"<volume><name>{name}.qcow2</name><capacity>0</capacity><target><format type='qcow2'/>"
            f"</target><backingStore><path>{base}</path>{form}</backingStore></volume>"
        )
        self._virsh("vol-create", _POOL, "/dev/stdin", stdin=volume.encode())
        backing = (
            f"<backingStore type='file'>{form}<source file={quoteattr(str(image.disk))}>"
            "<seclabel model='dac' relabel='no'/></source><backingStore/></backingStore>"
        )
        found = self._disk(f"{name}.qcow2", "qcow2", "vda", f"{backing}<serial>vtroot</serial>")
        if order.user_data or self._secrets or self._pool:
            secrets = read_private(Path(self._secrets)) if self._secrets else b""
            self._upload(f"{name}-seed.iso", seed(order, secrets, local=bool(self._pool)))
            rest = "<readonly/><serial>vtseed</serial>"
            found += self._disk(f"{name}-seed.iso", "raw", "vdb", rest)
        return found

    def _disk(self, volume: str, form: str, target: str, rest: str) -> str:
        return (
            f"<disk type='file' device='disk'><driver name='qemu' type='{form}'/>"
            f"<source file={quoteattr(f'{self._images}/{volume}')}/>"
            f"<target dev='{target}' bus='virtio'/>{rest}</disk>"
        )

    def _boot(self, name: str, image: Image) -> str:
        """Return the domain XML to boot from the disk, or to boot the image's kernel directly.

        The domain gets copies of kernel and initrd, because libvirt would change the image's owner.
        """
        if image.kernel is None:
            return "<boot dev='hd'/>"
        found = f"<cmdline>{escape(image.cmdline)}</cmdline>"
        for what, path in (("kernel", image.kernel), ("initrd", image.initrd)):
            if path is not None:
                self._upload(f"{name}-{what}", path.read_bytes())
                found += f"<{what}>{escape(f'{self._images}/{name}-{what}')}</{what}>"
        return found

    def _upload(self, volume: str, content: bytes) -> None:
        """Create a file of a machine, with libvirt's default mode 0600."""
        self._virsh("vol-create-as", _POOL, volume, str(len(content)), "--format", "raw")
        self._virsh("vol-upload", volume, "/dev/stdin", "--pool", _POOL, stdin=content)

    def _xml(self, name: str, order: MachineOrder, created: float, boot: str, disks: str) -> str:
        cpu = "<cpu mode='host-passthrough'/>" if self._accel == "kvm" else "<cpu mode='maximum'/>"
        tags = {
            "cluster": order.cluster, "node": order.node, "shape": order.shape,
            "created": repr(created),
        }  # fmt: skip
        words = " ".join(f"{key}={quoteattr(value)}" for key, value in tags.items())
        return (
            f"<domain type={quoteattr(self._accel)}><name>{name}</name>"
            f"<metadata><p:machine xmlns:p='{_NS}' {words}/></metadata>"
            f"<memory unit='MiB'>{order.memory + _SYSTEM}</memory><vcpu>{order.cpus}</vcpu>"
            f"<os><type machine='q35'>hvm</type>{boot}</os>{cpu}"
            "<features><acpi/></features><on_reboot>restart</on_reboot>"
            "<on_poweroff>destroy</on_poweroff><on_crash>destroy</on_crash><devices>"
            f"{disks}<interface type='network'><source network={quoteattr(self._network)}/>"
            f"<mac address='{_mac(order)}'/><model type='virtio'/></interface>"
            "<serial type='pty'/><rng model='virtio'><backend model='random'>/dev/urandom</backend>"
            f"</rng></devices><description>{escape(order.node)}</description></domain>"
        )

    def _tags(self, name: str) -> Mapping[str, str] | None:
        """Return the domain's tags; None if the domain has ended or has no tags."""
        try:
            text = self._virsh("metadata", name, _NS)
            found = ElementTree.fromstring(text)  # noqa: S314 - from libvirt
        except CloudFault as error:
            if "failed to get domain" in str(error) or "metadata not found" in str(error):
                return None
            raise
        except ElementTree.ParseError as error:
            raise CloudFault(f"{self._uri}: metadata of {name}: {error}") from None
        return (
            found.attrib if {"cluster", "node", "shape", "created"} <= set(found.attrib) else None
        )

    def _unless_gone(self, *words: str, gone: tuple[str, ...]) -> None:
        try:
            self._virsh(*words)
        except CloudFault as error:
            if not any(each in str(error).lower() for each in gone):
                raise

    def _virsh(self, *words: str, stdin: bytes | None = None) -> str:
        try:
            return run_tool(
                "virsh", "-q", "-c", self._uri, *words, timeout=self._timeout, stdin=stdin
            )
        except HostFault as error:
            raise CloudFault(str(error)) from None


def read_private(path: Path) -> bytes:
    """Return the content of a file that only root or this user can read.

    Raises:
        CloudFault: If other users can read it.
    """
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if status.st_uid not in (0, os.geteuid()) or stat.S_IMODE(status.st_mode) & 0o077:
                raise CloudFault(
                    f"{path}: contains secrets, so it must belong to root and have mode 0600"
                )
            return file.read()
    except OSError as error:
        raise CloudFault(
            f"{path}: {error.strerror}: correct the cloud's option 'secrets'"
        ) from None


def seed(order: MachineOrder, secrets: bytes = b"", *, local: bool = False) -> bytes:
    """Return a NoCloud image for cloud-init (label ``cidata``).

    Args:
        order: The machine to create.
        secrets: cloud-init's vendor data.
        local: Set ``dsmode: local``, as vTorque's own images require.

    Raises:
        HostFault: If pycdlib is missing.
    """
    if pycdlib is None:
        raise HostFault("cloud-init on libvirt needs pycdlib: install vtorque-pool[libvirt]")
    meta = f"instance-id: {order.cluster}-{order.node}\nlocal-hostname: {order.node}\n"
    meta += "dsmode: local\n" if local else ""
    iso = pycdlib.PyCdlib()
    iso.new(interchange_level=3, joliet=3, rock_ridge="1.09", vol_ident="cidata")
    for name, content in (
        ("user-data", order.user_data),
        ("meta-data", meta.encode()),
        ("vendor-data", secrets),
    ):
        path = f"/{name.upper().replace('-', '')}.;1"
        iso.add_fp(io.BytesIO(content), len(content), path, rr_name=name, joliet_path=f"/{name}")
    out = io.BytesIO()
    iso.write_fp(out)
    iso.close()
    return out.getvalue()


def _mac(order: MachineOrder) -> str:
    """Return the MAC address of a node's machine.

    It depends only on cluster and node, so the node's next machine gets the same IP address.
    """
    found = hashlib.sha256(f"{order.cluster}/{order.node}".encode()).hexdigest()
    return ":".join(["02", *(found[n : n + 2] for n in range(0, 10, 2))])


def _prefix(cluster: str) -> str:
    return f"vtorque-pool-{hashlib.sha256(cluster.encode()).hexdigest()[:8]}-"
