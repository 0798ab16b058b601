"""The driver libvirt against this machine's real libvirtd; the guests have no system.

To run: in ``scripts/machine``, after ``scripts/node libvirt``.
"""

import contextlib
import io
import re
import subprocess
import tempfile
import uuid
from pathlib import Path

import pycdlib
import pytest

from vtorque_pool.api import CloudFault, MachineOrder
from vtorque_pool.drivers import libvirt
from vtorque_testing.pool_driver import PoolDriverContract

_NETWORK = "vtorque-pool-test"
_BARE = (
    "<domain type='qemu'><name>{name}</name><memory unit='MiB'>32</memory><vcpu>1</vcpu>"
    "<os><type machine='q35'>hvm</type></os></domain>"
)


def virsh(*words, stdin=None, check=True):
    done = subprocess.run(
        ["virsh", "-q", "-c", "qemu:///system", *words],
        input=stdin, capture_output=True, check=False, timeout=60,
    )  # fmt: skip
    assert not check or done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


class LibvirtHarness:
    def __init__(self, images):
        self.images = images
        self.options = {"images": str(images), "network": _NETWORK, "accel": "qemu", "most": "7"}
        self.strangers = []

    def driver(self):
        return libvirt.driver(self.options)

    def order(self, node, cluster="contract"):
        data = b"#cloud-config\nhostname: x\n"
        return MachineOrder(cluster, node, "small", "empty.qcow2", memory=32, user_data=data)

    def stranger(self):
        name = f"stranger-{uuid.uuid4().hex[:6]}"
        virsh("create", "/dev/stdin", stdin=_BARE.format(name=name).encode())
        self.strangers.append(name)
        return name

    def list_machines(self):
        disks = {path.name.partition(".")[0] for path in self.images.glob("vtorque-pool-*")}
        return set(virsh("list", "--name").split()) | {d.removesuffix("-seed") for d in disks}

    @contextlib.contextmanager
    def silence(self):
        self.options["uri"] = "qemu+unix:///system?socket=/nowhere"
        yield
        del self.options["uri"]

    @contextlib.contextmanager
    def exhaust(self):
        self.options["most"] = "0"
        yield

    def user_data(self, machine):
        return content((self.images / f"{machine}-seed.iso").read_bytes(), "user-data")


@pytest.mark.e2e
@pytest.mark.full
class TestLibvirt(PoolDriverContract):
    @pytest.fixture
    def images(self):
        with tempfile.TemporaryDirectory(prefix="pool-", dir="/var/tmp") as name:
            yield Path(name)

    @pytest.fixture
    def cloud(self, images):
        images.chmod(0o755)
        subprocess.run(
            ["qemu-img", "create", "-q", "-f", "qcow2", images / "empty.qcow2", "1M"], check=True
        )
        network = f"<network><name>{_NETWORK}</name><bridge name='vtpool0'/></network>"
        virsh("net-create", "/dev/stdin", stdin=network.encode())
        found = LibvirtHarness(images)
        yield found
        for name in found.strangers:
            virsh("destroy", name)
        assert not [n for n in virsh("list", "--name").split() if n.startswith("vtorque-pool-")]
        assert [path.name for path in images.iterdir()] == ["empty.qcow2"]
        virsh("pool-destroy", "vtorque-pool", check=False)
        virsh("net-destroy", _NETWORK)

    def test_full_cloud_raises_stock_out_and_leaves_nothing(self, cloud, driver):
        super().test_full_cloud_raises_stock_out_and_leaves_nothing(
            cloud, libvirt.driver({**cloud.options, "most": "0"})
        )


def content(image, name):
    iso = pycdlib.PyCdlib()
    iso.open_fp(io.BytesIO(image))
    assert iso.pvd.volume_identifier.strip() == b"cidata"
    out = io.BytesIO()
    iso.get_file_from_iso_fp(out, rr_path=f"/{name}")
    iso.close()
    return out.getvalue()


def test_seed_has_the_files_of_cloud_init():
    order = MachineOrder("c", "n1", "small", user_data=b"#cloud-config\n")
    seed = libvirt.seed(order)
    assert content(seed, "meta-data") == b"instance-id: c-n1\nlocal-hostname: n1\n"
    assert content(seed, "user-data") == b"#cloud-config\n"
    ours = libvirt.seed(order, b"#cloud-config\n{}\n", local=True)
    assert content(ours, "meta-data").endswith(b"dsmode: local\n")
    assert content(ours, "vendor-data") == b"#cloud-config\n{}\n"


def test_secrets_that_others_can_read_are_refused(tmp_path):
    path = tmp_path / "secrets"
    path.write_bytes(b"#cloud-config\n")
    for mode in (0o640, 0o604, 0o620):
        path.chmod(mode)
        with pytest.raises(CloudFault, match="mode 0600"):
            libvirt.read_private(path)
    path.chmod(0o600)
    assert libvirt.read_private(path) == b"#cloud-config\n"
    with pytest.raises(CloudFault, match="No such file"):
        libvirt.read_private(tmp_path / "other")


def test_tags_and_names_are_escaped_in_the_xml():
    driver = libvirt.driver({"images": "/x"})
    text = driver._xml("vtorque-pool-x", MachineOrder("a'<b>", 'n"&', "small"), 1.0, "", "")
    from xml.etree import ElementTree

    tags = ElementTree.fromstring(text).find(  # noqa: S314
        "metadata/{https://vtorque.org/xmlns/pool/1}machine"
    )
    assert (tags.get("cluster"), tags.get("node")) == ("a'<b>", 'n"&')


def test_replaced_machine_of_a_node_keeps_its_mac():
    made = libvirt.Libvirt({}, None)
    orders = [
        MachineOrder("c", "n1", "s"),
        MachineOrder("c", "n1", "s"),
        MachineOrder("c", "n2", "s"),
    ]
    orders += [MachineOrder("other", "n1", "s")]
    texts = [made._xml(f"m{n}", order, n, "", "") for n, order in enumerate(orders)]
    macs = [re.search("<mac address='(02(:[0-9a-f]{2}){5})'/>", text)[1] for text in texts]
    assert macs[0] == macs[1]
    assert len(set(macs)) == 3
