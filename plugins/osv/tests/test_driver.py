"""Parts of an OSv guest, and its command line from an order."""

import dataclasses
import io
import json
import os
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pycdlib
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vtorque_osv import bootline, driver, node
from vtorque_osv.bootline import BootLine
from vtorque_osv.check import check_script
from vtorque_osv.driver import OsvDriver
from vtorque_osv.order import BootOrder, GuestProperties
from vtorque_osv.settings import Settings, mode

from vtorque_core.api import Refused
from vtorque_core.api.guest_context import EnvVar, GuestFile
from vtorque_core.api.guest_driver import LateDriver
from vtorque_core.api.guest_plan import Address, JobUser, Share
from vtorque_core.api.libvirt_domain import Clock, Console, Disk, Filesystem, KernelBoot
from vtorque_core.api.values import Image, JobRequest
from vtorque_core.resources.disk import Overlay
from vtorque_testing.planned import domain, guest_plan

IMAGE = Image(
    "sim", "osv", "OSV", "x86_64", "0" * 64, disk=Path("/p/disk.raw"), disk_format="raw",
    kernel=Path("/p/loader.elf"), cmdline="--rootfs=rofs --env=N=2",
    labels={"command.greet": "/prog hello", "mounts": "/data,/nfs"},
)  # fmt: skip
USER = JobUser("ada", 1000, 1001, (("ada", 1001),), "/home/ada", "/bin/sh")
VALUES = {"osv_mode": "cmdline", "fs_type": "sharedfs", "vm_prologue": None, "vm_epilogue": None,
          "disk": ""}  # fmt: skip
PLAN = guest_plan(
    ram_mib=64, image=IMAGE, user=USER, request=JobRequest(VALUES),
    addresses=(Address("52:54:00:01:02:03", "10.86.0.16", 16, "10.86.0.1", ("10.0.0.53",)),),
    peers=(("vn1", "10.86.0.16"),),
    shares=(Share("home", "/home/ada", "/home/ada", user_owned=True),
            Share("data", "/srv/data", "/data"), Share("n", "srv:/exp", "/nfs", kind="nfs")),
)  # fmt: skip
NODE_FILE = "/var/spool/torque/aux/42.srv"
ITEMS = (EnvVar("VTORQUE_RANK", "0"), EnvVar("PBS_NODEFILE", NODE_FILE),
         GuestFile(NODE_FILE, b"vn1\n"), GuestFile("/opt/srun", b"#!/bin/sh"),
         EnvVar("DISTRO", "OSV"))  # fmt: skip


class OsvSite:
    def __getitem__(self, settings):
        assert settings is Settings
        return self.settings

    def __init__(self, **values):
        self.settings = Settings(**values)


def plan(image=None, **values):
    request = JobRequest({**VALUES, **values}, frozenset(values))
    return dataclasses.replace(PLAN, request=request, image=image or IMAGE)


def labelled(**labels):
    return dataclasses.replace(IMAGE, labels={**IMAGE.labels, **labels})


def order(script="/prog x\n", cwd="/", **environ):
    return BootOrder(script.encode(), environ, cwd).encode()


def late(guest, sent):
    """Return the carrier of the command line, and the script disk's line."""
    *files, found = OsvDriver().late_items(guest, ITEMS, sent, OsvSite())
    texts = [each.content.decode().split("\n")[0] for each in files]
    assert all((e.path, e.mode, e.uid) == ("/s/script", 0o400, guest.qemu_uid) for e in files)
    return found, "".join(texts)


def test_driver_is_a_late_driver():
    assert isinstance(OsvDriver(), LateDriver)


def test_domain_has_clock_console_kernel_shares_and_script_disk():
    found = list(OsvDriver().elements(PLAN, OsvSite()))
    assert Clock(hpet=True) in found
    assert Console("/r/console.sock") in found
    assert KernelBoot(kernel="/p/loader.elf") in found
    shares = [e for e in found if isinstance(e, Filesystem)]
    assert [(e.source, e.readonly) for e in shares] == [("/srv/data", True)]
    assert [e.path for e in found if isinstance(e, Disk)] == ["/s/script"]


def test_order_becomes_a_command_line_and_a_script_disk():
    sent = order("#!/bin/sh\ngreet 1\n/prog\n", "/data/x", A="b c", D="$x", PBS_NODEFILE="f")
    element, text = late(PLAN, sent)
    assert element == KernelBoot(
        cmdline="--rootfs=rofs --env=N=2 --verbose --power-off-on-abort --console=serial --noinit"
        " --ip=eth0,10.86.0.16,255.255.0.0 --defaultgw=10.86.0.1 --nameserver=10.0.0.53"
        " --mount-fs=virtiofs,/dev/virtiofs0,/data --cwd=/data/x"
        " --env=D=$x runscript /dev/vblk1"
    )
    assert text == (
        '"--env=A=b c" --env=DISTRO=OSV --env=VTORQUE_RANK=0 --env=VTORQUE_OUTPUT=begins'
        " /prog hello 1; /prog"
    )


def test_guest_without_a_root_disk_has_the_script_as_first_disk():
    assert late(plan(dataclasses.replace(IMAGE, disk=None)), order())[0].cmdline.endswith("/vblk0")


def test_working_directory_outside_the_guest_is_left_out():
    assert "--cwd" not in late(PLAN, order(cwd="/home/ada"))[0].cmdline
    assert "--cwd" not in late(PLAN, order(cwd="/data\\x"))[0].cmdline


def test_nfs_is_mounted_if_the_image_supports_it():
    _, text = late(plan(labelled(nfs="true")), order())
    assert text.endswith(" /tools/mount-fs.so nfs nfs://srv/exp?version=4 /nfs; /prog x")


def test_seed_is_added_if_the_image_reads_one():
    guest = plan(labelled(**{"cloud-init": "true"}))
    disks = [e.path for e in OsvDriver().elements(guest, OsvSite()) if isinstance(e, Disk)]
    assert disks == ["/s/seed.iso", "/s/script"]
    element, text = late(guest, order())
    assert element.cmdline.endswith(" runscript /dev/vblk2")
    assert text.endswith(" /usr/mgmt/cloud-init.so; /prog x")
    assert "--env=PBS_NODEFILE=/tmp/42.srv" in text
    properties, seed = OsvDriver().resources(guest, ITEMS, OsvSite())
    assert GuestProperties.decode(properties.content).begin == "cloud-init: copied file "
    image = pycdlib.PyCdlib()
    image.open_fp(io.BytesIO(seed.content))
    out = io.BytesIO()
    image.get_file_from_iso_fp(out, rr_path="/user-data")
    assert json.loads(out.getvalue()) == {"files": {"/tmp/42.srv": "vn1\n"}}
    assert (seed.mode, seed.uid) == (0o400, guest.qemu_uid)


def test_only_the_server_runs_in_rest_mode():
    guest = plan(labelled(rest="true"), osv_mode="rest")
    element, text = late(guest, order(A="secret", B="$x"))
    assert element.cmdline.endswith("/data /libhttpserver-api.so")
    assert (text, "secret" in element.cmdline) == ("", False)
    assert not any(isinstance(e, Disk) for e in OsvDriver().elements(guest, OsvSite()))
    (properties,) = OsvDriver().resources(guest, ITEMS, OsvSite(rest=True, rest_timeout=7.0))
    assert (properties.mode, properties.gid) == (0o440, 1001)
    assert GuestProperties.decode(properties.content) == GuestProperties(
        mode="rest", address="10.86.0.16", begin="Rest API server running on port ",
        named={"greet": "/prog hello"}, files={"/tmp/42.srv": "vn1\n"},
        environ={"VTORQUE_RANK": "0", "PBS_NODEFILE": "/tmp/42.srv", "DISTRO": "OSV"}, seconds=7.0,
    )  # fmt: skip


def test_boot_line_is_written_to_a_disk_that_boots_without_a_kernel():
    guest = plan(dataclasses.replace(IMAGE, kernel=None), fs_type="ramdisk")
    found, _ = late(guest, order())
    assert isinstance(found, BootLine)
    assert found.overlay == "/r/ram/root.qcow2"
    assert found.line.endswith(" runscript /dev/vblk1")
    with pytest.raises(Refused, match="1023 bytes"):
        late(guest, order(A="$" + "x" * 1000))


def test_boot_line_is_written_with_the_privileges_of_the_qemu_user(tmp_path, monkeypatch):
    """qemu-io parses the image, which may be untrusted."""
    image, overlay = tmp_path / "base", tmp_path / "overlay"
    image.write_bytes(bytes(1 << 20))
    Overlay(str(overlay), str(image), "raw").create()
    asked = []
    line = BootLine(str(overlay), "--verbose /prog")
    with monkeypatch.context() as patched:
        patched.setattr(bootline, "run_tool", lambda *argv, uid: asked.append((argv, uid)))
        line.create()
    ((argv, uid),) = asked
    assert (argv[0], uid) == ("qemu-io", overlay.stat().st_uid)
    if os.geteuid() == 0:
        line.create()
        raw = tmp_path / "raw"
        convert = ["qemu-img", "convert", "-f", "qcow2", "-O", "raw", overlay, raw]
        subprocess.run(convert, check=True, timeout=180)
        assert raw.read_bytes()[512:528] == b"--verbose /prog\0"


def test_several_nodes_are_refused():
    guest = dataclasses.replace(PLAN, peers=(("vn1", "10.86.0.16"), ("vn2", "10.86.0.17")))
    with pytest.raises(Refused, match="an OSv job can have only one node, not 2"):
        list(OsvDriver().context(guest, OsvSite()))
    two = dataclasses.replace(guest, guests_per_node=2)
    assert list(OsvDriver().context(two, OsvSite())) == [EnvVar("DISTRO", "OSV")]


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"3", b'{"script": 1, "environ": {}, "cwd": ""}', b"\xff\xfe", b"null",
     b'{"script": "", "environ": {"A": 3}, "cwd": ""}', b"[" * 100_000,
     b'{"script": "", "environ": [], "cwd": ""}'],
)  # fmt: skip
def test_bad_order_is_refused(data):
    with pytest.raises(Refused):
        late(PLAN, data)


@given(st.binary(max_size=200), st.dictionaries(st.text(max_size=5), st.text(max_size=9)),
       st.text(max_size=20))  # fmt: skip
def test_any_order_gives_a_printable_line_or_is_refused(script, environ, cwd):
    try:
        element, text = late(PLAN, BootOrder(script, environ, cwd).encode())
    except Refused:
        return
    for line in (element.cmdline, text):
        assert line.replace("\t", " ").isprintable()
        assert line.isascii()


def refusals(guest, **settings):
    return [str(each) for each in node.vtorque_plan(guest, OsvSite(**settings))]


def test_options_unsupported_by_osv_image_or_site_are_refused():
    file = type("F", (), {"name": "p.sh", "content": b""})()
    assert refusals(PLAN) == []
    assert "has no REST server" in refusals(plan(osv_mode="rest"), rest=True)[0]
    allowed = refusals(plan(labelled(rest="true"), osv_mode="rest"))
    assert "[plugin.osv] rest = false" in allowed[0]
    assert refusals(plan(labelled(rest="true"), osv_mode="rest"), rest=True) == []
    assert "needs a shell, and OSv has none" in refusals(plan(vm_prologue=file))[0]
    assert "cannot write a user's disk" in refusals(plan(disk="/home/ada/d"))[0]
    linux = dataclasses.replace(IMAGE, guest_type="linux")
    assert refusals(plan(linux)) == []
    assert "is not OSv" in refusals(plan(linux, osv_mode="rest"))[0]


def test_unknown_mode_is_refused():
    assert mode("rest") == "rest"
    with pytest.raises(ValueError, match="cmdline or rest"):
        mode("shell")


def test_script_is_checked_against_the_image():
    assert check_script(b"greet\n/prog\n", IMAGE) == ()
    (refusal,) = check_script(b"\nbye\n", IMAGE)
    assert "line 2" in refusal.message
    assert "commands greet" in refusal.message


def test_files_that_no_variable_names_stay_outside():
    guest = plan(labelled(rest="true"), osv_mode="rest")
    assert driver.referenced_files(guest, ITEMS) == {"/tmp/42.srv": "vn1\n"}
    latin = [EnvVar("DATA", "/x/data"), GuestFile("/x/data", b"caf\xe9\n")]
    with pytest.raises(
        Refused, match="/x/data: is not UTF-8, but OSv guests support only text files"
    ):
        driver.referenced_files(guest, latin)


def test_domain_of_a_guest_has_console_timer_and_command_line():
    """Rendered by the core: console as a socket, HPET, only virtio disks."""
    found = [*OsvDriver().elements(PLAN, OsvSite()), late(PLAN, order(A="$<&"))[0]]
    xml = ElementTree.fromstring(domain(PLAN, found))  # noqa: S314 - our own
    serial = xml.find("devices/serial")
    assert serial.get("type") == "unix"
    assert serial.find("source").attrib == {"mode": "connect", "path": "/r/console.sock"}
    assert xml.find("devices/console") is None
    assert xml.find("clock/timer[@name='hpet']").get("present") == "yes"
    assert "--env=A=$<& runscript /dev/vblk1" in xml.findtext("os/cmdline")
    assert [each.find("target").get("bus") for each in xml.findall("devices/disk")] == ["virtio"]
