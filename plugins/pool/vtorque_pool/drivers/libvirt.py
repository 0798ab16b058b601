"""Hosts of the site's own, by virsh: here, or elsewhere by ``qemu+ssh``.

Options: ``uri`` (``qemu:///system``), ``network`` (libvirt's, ``default``), ``images`` (directory
of the images and of the machines' own disks, on that host), ``most`` (machines at most),
``accel`` (``kvm`` or ``qemu``, which is emulation), ``timeout`` (seconds, 60).

A machine is a transient domain: one that ends is gone. Its disk is an overlay that libvirt makes
above ``<images>/<image>``, in a storage pool ``vtorque-pool``. Tags are in the domain's metadata.
The name of domain and disk has cluster and time, so that a disk without a domain is known, too.
"""

from __future__ import annotations

import hashlib
import re
import time
import uuid
from collections.abc import Mapping
from xml.etree import ElementTree
from xml.sax.saxutils import escape, quoteattr

from vtorque_core.api import HostFault, run_tool
from vtorque_pool.api import CloudFault, Driver, Machine, Order, StockOut

_NS = "https://vtorque.org/xmlns/pool/1"
_POOL = "vtorque-pool"
_NAME = re.compile(r"vtorque-pool-[0-9a-f]{8}-([0-9a-f]{8})-[0-9a-f]{8}")
_START = 600.0  # seconds: a disk so old without a domain is nobody's


def driver(options: Mapping[str, str]) -> Driver:
    """Return the driver. Raises ValueError."""
    most = options.get("most", "")
    return Libvirt(options, int(most) if most else None)


class Libvirt:
    """See :class:`vtorque_pool.api.Driver`."""

    def __init__(self, options: Mapping[str, str], most: int | None) -> None:
        self._uri = options.get("uri", "qemu:///system")
        self._network = options.get("network", "default")
        self._images = options.get("images", "/var/lib/vtorque-pool/images")
        self._accel = options.get("accel", "kvm")
        self._timeout = float(options.get("timeout", "60"))
        self._most = most

    def create(self, order: Order) -> Machine:
        """Make the disk, then start the domain; a kill between them leaves a disk, see machines."""
        if self.quota() == 0:
            raise StockOut(f"{self._uri} has {self._most} machines, which is its most")
        if not re.fullmatch(r"[\w.+-]+", order.image, re.ASCII):
            raise CloudFault(f"{order.image!r} is no name of a file in {self._images}")
        created = time.time()
        name = f"{_prefix(order.cluster)}{int(created):08x}-{uuid.uuid4().hex[:8]}"
        self._prepare()
        backing = f"{self._images}/{order.image}"
        self._virsh(
            "vol-create-as", _POOL, f"{name}.qcow2", "0", "--format", "qcow2",
            "--backing-vol", backing, "--backing-vol-format", "qcow2",
        )  # fmt: skip
        try:
            self._virsh("create", "/dev/stdin", stdin=self._xml(name, order, created).encode())
        except CloudFault as error:
            self.destroy(name)
            if "memory" in str(error).lower():
                raise StockOut(str(error)) from None
            raise
        return Machine(name, order.node, order.shape, created, "running")

    def machines(self, cluster: str) -> list[Machine]:
        """Return the domains with our metadata, and as ended what is left of others: disks."""
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
        """End the domain and remove its disk."""
        if not _NAME.fullmatch(machine):
            return
        self._unless_gone(
            "destroy", machine, gone=("failed to get domain", "domain is not running")
        )
        for volume in (f"{machine}.qcow2", f"{machine}-seed.iso"):
            gone = ("failed to get vol", "storage pool not found", "failed to get pool")
            self._unless_gone("vol-delete", volume, "--pool", _POOL, gone=gone)

    def quota(self) -> int | None:
        """Return what the option most leaves."""
        if self._most is None:
            return None
        names = self._virsh("list", "--name").split()
        return max(0, self._most - sum(bool(_NAME.fullmatch(name)) for name in names))

    def _prepare(self) -> None:
        """Have the storage pool; two that make it at once are no harm."""
        if _POOL in self._virsh("pool-list", "--name").split():
            return
        try:
            self._virsh("pool-create-as", _POOL, "dir", "--target", self._images)
        except CloudFault:
            if _POOL not in self._virsh("pool-list", "--name").split():
                raise

    def _seed(self, name: str, order: Order) -> str:
        """Upload cloud-init's NoCloud image, if there is user data; return the XML of its disk."""
        if not order.user_data:
            return ""
        content = seed(order)
        volume = f"{name}-seed.iso"
        self._virsh("vol-create-as", _POOL, volume, str(len(content)), "--format", "raw")
        self._virsh("vol-upload", volume, "/dev/stdin", "--pool", _POOL, stdin=content)
        path = quoteattr(f"{self._images}/{volume}")
        return (
            f"<disk type='file' device='cdrom'><source file={path}/>"
            "<target dev='sda' bus='sata'/><readonly/></disk>"
        )

    def _xml(self, name: str, order: Order, created: float) -> str:
        cpu = "<cpu mode='host-passthrough'/>" if self._accel == "kvm" else "<cpu mode='maximum'/>"
        tags = {
            "cluster": order.cluster, "node": order.node, "shape": order.shape,
            "created": repr(created),
        }  # fmt: skip
        words = " ".join(f"{key}={quoteattr(value)}" for key, value in tags.items())
        disk = quoteattr(f"{self._images}/{name}.qcow2")
        return (
            f"<domain type={quoteattr(self._accel)}><name>{name}</name>"
            f"<metadata><p:machine xmlns:p='{_NS}' {words}/></metadata>"
            f"<memory unit='MiB'>{order.memory}</memory><vcpu>{order.cpus}</vcpu>"
            f"<os><type machine='q35'>hvm</type><boot dev='hd'/></os>{cpu}"
            "<features><acpi/></features><on_reboot>restart</on_reboot>"
            "<on_poweroff>destroy</on_poweroff><on_crash>destroy</on_crash><devices>"
            f"<disk type='file' device='disk'><driver name='qemu' type='qcow2'/>"
            f"<source file={disk}/><target dev='vda' bus='virtio'/></disk>"
            f"{self._seed(name, order)}"
            f"<interface type='network'><source network={quoteattr(self._network)}/>"
            "<model type='virtio'/></interface>"
            "<serial type='pty'/><rng model='virtio'><backend model='random'>/dev/urandom</backend>"
            f"</rng></devices><description>{escape(order.node)}</description></domain>"
        )

    def _tags(self, name: str) -> Mapping[str, str] | None:
        """Return the domain's tags; None: it is gone, or has none."""
        try:
            text = self._virsh("metadata", name, _NS)
            found = ElementTree.fromstring(text)  # noqa: S314 - what libvirt says
        except CloudFault as error:
            if "failed to get domain" in str(error) or "metadata not found" in str(error):
                return None
            raise
        except ElementTree.ParseError as error:
            raise CloudFault(f"{self._uri}: the metadata of {name}: {error}") from None
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


def seed(order: Order) -> bytes:
    """Return cloud-init's NoCloud image (label ``cidata``). Raises HostFault without pycdlib."""
    import io  # noqa: PLC0415

    try:
        import pycdlib  # noqa: PLC0415 - an extra
    except ImportError:
        raise HostFault(
            "user data on libvirt needs pycdlib: install vtorque-pool[libvirt]"
        ) from None
    meta = f"instance-id: {order.cluster}-{order.node}\nlocal-hostname: {order.node}\n".encode()
    iso = pycdlib.PyCdlib()
    iso.new(interchange_level=3, joliet=3, rock_ridge="1.09", vol_ident="cidata")
    for name, content in (("user-data", order.user_data), ("meta-data", meta)):
        path = f"/{name.upper().replace('-', '')}.;1"
        iso.add_fp(io.BytesIO(content), len(content), path, rr_name=name, joliet_path=f"/{name}")
    out = io.BytesIO()
    iso.write_fp(out)
    iso.close()
    return out.getvalue()


def _prefix(cluster: str) -> str:
    return f"vtorque-pool-{hashlib.sha256(cluster.encode()).hexdigest()[:8]}-"
