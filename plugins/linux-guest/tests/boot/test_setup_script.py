"""setup.sh run by real shells below a directory that replaces the guest's root."""

from __future__ import annotations

import os
import shlex
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from patience import LONG
from sample_guests import (
    AS_NOBODY,
    DEBIAN,
    MICRO,
    PLAN,
    ROCKY,
    SHELLS,
    USER,
    FakeRoot,
    fake_guest,
)
from vtorque_core.api import HostFault, Refused
from vtorque_core.api.guest_context import (
    CancelCommand,
    EnvVar,
    GuestDevice,
    GuestFile,
    KernelModule,
    Mount,
    Package,
    PciMemory,
    RootCommand,
)
from vtorque_core.api.guest_plan import Address
from vtorque_linux_guest.boot import setup_script
from vtorque_linux_guest.settings import Settings, SiteScript

HOME = Mount("virtiofs", "home", "/home/alice")
HOSTILE = ["'", '"', "\n", "$(touch /tmp/vtorque-pwned)", "`id`", "\\", "\\n", "%s", "*", "~", "!"]
TEXT = st.lists(
    st.one_of(
        st.sampled_from(
            [*HOSTILE, ";", "&", "|", "-", "--", " ", "\t", "\r", "#", "$HOME", "${R}"]
        ),
        st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=4),
    ),
    max_size=8,
).map("".join)


def test_micro_guest_is_set_up_completely(fake_root: FakeRoot, plan) -> None:
    ran = fake_root.setup(plan(ntp=("10.0.0.123",)), [EnvVar("DISTRO", "SLG"), HOME])
    assert (ran.code, ran.output) == (0, "")
    assert ran.steps == (
        "host name",
        "network 10.86.0.16",
        "time servers",
        "user alice",
        "hosts",
        "environment",
        "mount /home/alice",
    )
    assert fake_root.read("/proc/sys/kernel/hostname") == "vn1"
    assert fake_root.read("/etc/hostname") == "vn1\n"
    assert ran.calls_of("ip") == [
        ("link", "set", "dev", "eth0", "up"),
        ("addr", "add", "10.86.0.16/16", "dev", "eth0"),
        ("route", "add", "default", "via", "10.86.0.1", "dev", "eth0"),
    ]
    assert ran.calls_of("ntpd") == [("-p", "10.0.0.123")]
    assert fake_root.read("/etc/resolv.conf") == "search a.example b\nnameserver 10.0.0.53\n"
    assert "10.86.0.80 vn2\n" in fake_root.read("/etc/hosts")
    home = str(fake_root.path / "home/alice")
    assert ran.calls_of("mount") == [("-t", "virtiofs", "-o", "rw,nosuid,nodev", "home", home)]
    assert (fake_root.path / "home/alice").is_dir()
    assert ran.calls_of("chown") == []


def test_users_and_groups_of_the_cluster_replace_those_of_the_image(fake_root: FakeRoot) -> None:
    assert fake_root.setup(PLAN, [HOME]).code == 0
    assert fake_root.read("/etc/passwd") == (
        "alice:x:1000:1000::/home/alice:/bin/sh\nroot:x:0:0:root:/root:/bin/sh\n"
    )
    assert fake_root.read("/etc/group") == "alice:x:1000:\nproj:x:2000:alice\nroot:x:0:\n"
    assert fake_root.read("/etc/shadow") == "alice:*:::::::\n"
    assert fake_root.mode("/etc/shadow") == 0o600


def test_setup_can_be_repeated(fake_root: FakeRoot) -> None:
    fake_root.setup(PLAN, [HOME])
    first = fake_root.read("/etc/passwd"), fake_root.read("/etc/group")
    assert fake_root.setup(PLAN, [HOME]).code == 0
    assert (fake_root.read("/etc/passwd"), fake_root.read("/etc/group")) == first


def test_missing_login_shell_becomes_sh(fake_root: FakeRoot, plan) -> None:
    user = replace(USER, shell="/bin/zsh")  # noqa: S604
    assert fake_root.setup(plan(user=user), [HOME]).code == 0
    assert fake_root.read("/etc/passwd").startswith("alice:x:1000:1000::/home/alice:/bin/sh\n")


def test_login_shell_that_a_script_installs_is_used(fake_root: FakeRoot, plan) -> None:
    """A package or script of the site can install the shell after the user was created."""
    user = replace(USER, shell="/bin/zsh")  # noqa: S604
    place = shlex.quote(f"{fake_root.path}/bin")
    zsh = f"#!/bin/sh\nmkdir -p {place}\n: >{place}/zsh\nchmod +x {place}/zsh\n"
    prologue = [SiteScript("zsh", zsh.encode())]
    assert fake_root.setup(plan(user=user), [HOME], prologue=prologue).code == 0
    assert fake_root.read("/etc/passwd") == (
        "alice:x:1000:1000::/home/alice:/bin/zsh\nroot:x:0:0:root:/root:/bin/sh\n"
    )


def test_setup_links_aliases_of_a_share(fake_root: FakeRoot) -> None:
    """A link replaces no file of the image, and is never inside a share, where it would remain."""
    (fake_root.path / "there").mkdir()
    names = ("/data/u", "/there", "/home/alice/x", "/u")
    links = dict.fromkeys(names, "/home/alice")
    for _ in range(2):
        assert fake_root.setup(PLAN, [HOME], links=links).code == 0
        for name in names:
            path = Path(f"{fake_root.path}{name}")
            assert path.is_symlink() == (name in ("/data/u", "/u")), name
    assert str((fake_root.path / "data/u").readlink()) == "/home/alice"


def test_sudo_is_revoked_if_installed(fake_root: FakeRoot) -> None:
    (fake_root.path / "etc/sudoers.d").mkdir()
    assert fake_root.setup(PLAN, [HOME]).code == 0
    assert fake_root.read("/etc/sudoers.d/zz-vtorque") == "#1000 ALL=(ALL:ALL) !ALL\n"
    assert fake_root.mode("/etc/sudoers.d/zz-vtorque") == 0o440


def test_without_a_home_share_the_home_is_the_guests_own(fake_root: FakeRoot, plan) -> None:
    ran = fake_root.setup(plan(shares=()))
    assert ran.calls_of("chown") == [("1000:1000", str(fake_root.path / "home/alice"))]
    assert fake_root.mode("/home/alice") == 0o700


def test_nic_without_an_address_uses_dhcp(fake_root: FakeRoot, plan) -> None:
    ran = fake_root.setup(plan(addresses=(Address("52:54:00:01:02:03"),)), [HOME])
    script = str(fake_root.path / "run/vtorque/udhcpc.sh")
    assert ran.calls_of("udhcpc") == [("-i", "eth0", "-n", "-t", "10", "-T", "1", "-s", script)]
    assert os.access(script, os.X_OK)


def test_missing_nic_is_named(fake_root: FakeRoot, plan) -> None:
    ran = fake_root.setup(plan(addresses=(Address("52:54:00:ff:ff:ff", "10.86.0.9"),)))
    assert ran.code == 1
    assert ran.steps[-1] == "network 10.86.0.9"
    assert ran.output == "no network card has the address 52:54:00:ff:ff:ff\n"


@pytest.mark.parametrize(
    "shell",
    [
        pytest.param(SHELLS[0], id="dash"),
        pytest.param(SHELLS[1], id="busybox", marks=pytest.mark.full),
    ],
)
@settings(max_examples=max(8, settings().max_examples // 5), deadline=None)
@given(
    words=st.lists(TEXT, min_size=1, max_size=4),
    value=TEXT,
    content=st.binary(max_size=200),
    name=TEXT.filter(lambda t: "/" not in t and t not in {"", ".", ".."} and len(t.encode()) < 200),
)
def test_hostile_values_are_passed_unchanged(
    shell: list[str], words: list[str], value: str, content: bytes, name: str
) -> None:
    with fake_guest(shell) as root:
        root.stub("a-tool")
        path = f"/data/{name}"
        items = [
            RootCommand(("a-tool", *words)),
            RootCommand(("a-tool", value), stage="boot"),
            EnvVar("VALUE", value),
            GuestFile(path, content, mode=0o640),
            Mount("virtiofs", value, path + "-mount", readonly=True),
            KernelModule("vhost", (value,)),
            HOME,
        ]
        ran = root.setup(PLAN, items, prologue=[SiteScript(value, b"#!/bin/sh\nexit 0\n")])
        assert (ran.code, ran.output) == (0, "")
        assert ran.calls_of("a-tool") == [(value,), tuple(words)]
        assert ran.calls_of("modprobe") == [("vhost", value)]
        mount = ("-t", "virtiofs", "-o", "ro,nosuid,nodev", value, f"{root.path}{path}-mount")
        assert mount in ran.calls_of("mount")
        assert (root.path / path[1:]).read_bytes() == content
        profile = _escaped(root.path / "etc/profile.d/vtorque.sh")
        shown = subprocess.run(
            [*shell, "-c", f". '{profile}'; printf '%s' \"$VALUE\""],
            capture_output=True,
            check=True,
            timeout=180,
            **AS_NOBODY,
        )
        assert shown.stdout.decode() == value
    assert not Path("/tmp/vtorque-pwned").exists()


def test_files_get_their_modes_and_replace_those_of_the_image(fake_root) -> None:
    (fake_root.path / "data").mkdir()
    (fake_root.path / "data/b").write_text("of the image")
    (fake_root.path / "data/b").chmod(0o600)
    modes = {"/data/a": 0o644, "/data/b": 0o755, "/data/c d": 0o755, "/data/e": 0o640}
    items = [GuestFile(path, path.encode(), mode=mode) for path, mode in modes.items()]
    ran = fake_root.setup(PLAN, items)
    assert (ran.code, ran.output) == (0, "")
    found = {path: fake_root.path / path[1:] for path in modes}
    assert {path: file.read_text() for path, file in found.items()} == {
        path: path for path in modes
    }
    assert {path: file.stat().st_mode & 0o7777 for path, file in found.items()} == modes


def _escaped(path: Path) -> str:
    return str(path).replace("'", "'\\''")


@pytest.mark.parametrize(
    "item",
    [
        GuestFile("relative", b""),
        GuestFile("/a/../../etc/shadow", b""),
        EnvVar("A=B", "x"),
        EnvVar("$(id)", "x"),
        RootCommand(("a\0b",)),
        RootCommand(()),
        GuestDevice("../mem", "/dev/x"),
        GuestDevice("/etc/passwd", "/dev/x"),
        Mount("virtiofs", "x", "not/absolute"),
    ],
)
def test_invalid_item_is_refused_before_the_boot(item: object) -> None:
    with pytest.raises(HostFault):
        setup_script.build(PLAN, [item], Settings())


def test_group_name_with_a_colon_or_newline_is_refused() -> None:
    user = replace(USER, groups=(("alice", 1000), ("a:b\nroot", 0)))
    with pytest.raises(HostFault, match="passwd or group"):
        setup_script.build(replace(PLAN, user=user), [], Settings())


def test_failed_command_ends_the_setup_with_its_output(fake_root: FakeRoot) -> None:
    fake_root.stub("rdma", "#!/bin/sh\necho 'link add: no such device' >&2\nexit 3\n")
    fake_root.stub("never")
    ran = fake_root.setup(PLAN, [HOME, RootCommand(("rdma", "link")), RootCommand(("never",))])
    assert ran.code == 1
    assert ran.steps[-1] == "command rdma link"
    assert ran.output == "link add: no such device\nrdma: exit code 3\n"
    assert ran.calls_of("never") == []


def test_output_of_earlier_steps_is_not_in_the_reason(fake_root: FakeRoot) -> None:
    fake_root.stub("noisy", "#!/bin/sh\necho noise\n")
    ran = fake_root.setup(PLAN, [HOME, RootCommand(("noisy",)), RootCommand(("not-there",))])
    assert ran.code != 0
    assert "not-there" in ran.output
    assert "noise" not in ran.output


def test_failed_mount_names_its_target(fake_root: FakeRoot) -> None:
    fake_root.stub("mount", "#!/bin/sh\necho 'mount: tag not found' >&2\nexit 32\n")
    ran = fake_root.setup(PLAN, [HOME])
    assert (ran.code, ran.steps[-1]) == (1, "mount /home/alice")
    assert ran.output == "mount: tag not found\nmount: exit code 32\n"


@pytest.mark.parametrize("items", [[], [HOME]], ids=["own home", "mount"])
@pytest.mark.parametrize("shell", SHELLS, ids=["dash", "busybox"])
@pytest.mark.parametrize("link", ["home", "home/alice"])
def test_mount_point_that_is_a_link_of_a_container_fails_the_setup(
    plan, link: str, shell: list[str], items: list[Mount]
) -> None:
    image = replace(MICRO, labels={**MICRO.labels, "container": "/usr/lib/vtorque"})
    with fake_guest(shell) as root:
        ran = root.setup(plan(image=image), items)
        assert ran.code == 0, ran.output
        place = root.path / link
        place.rename(place.with_name("elsewhere"))
        place.symlink_to("elsewhere")
        ran = root.setup(plan(image=image), items)
        assert ran.code == 1
        said = f"{place} is a link in the image: {root.path}/home/alice cannot be used"
        assert said in ran.output
        assert not ran.calls_of("mount")
        assert root.setup(plan(), items).code == 0  # an image of the site may have links


def test_daemon_does_not_inherit_the_pipes_of_the_agent(fake_root: FakeRoot) -> None:
    held = "[ ! -e /proc/$$/fd/3 ] && [ ! -e /proc/$$/fd/4 ]"
    fake_root.stub("daemon", f"#!/bin/sh\n{held} || exit 9\nsleep 1000 &\n")
    assert fake_root.setup(PLAN, [HOME, RootCommand(("daemon",))]).code == 0
    # and the end of stdout was not awaited


def test_items_are_set_up_in_the_order_of_their_stages(fake_root: FakeRoot) -> None:
    for name in ("early", "late"):
        fake_root.stub(name)
    items = [
        RootCommand(("late",)),
        Mount("virtiofs", "sub", "/home/alice/sub"),
        HOME,
        KernelModule("ib_core"),
        RootCommand(("early",), stage="boot"),
    ]
    ran = fake_root.setup(PLAN, items, prologue=[SiteScript("10-check", b"#!/bin/sh\n")])
    assert ran.steps[-6:] == (
        "kernel module ib_core",
        "command early",
        "mount /home/alice",
        "mount /home/alice/sub",
        "site prologue 10-check",
        "command late",
    )


def at(offset: int, text: bytes) -> bytes:
    return text.rjust(offset + len(text), b"\0").ljust(8192, b"\0")


@pytest.mark.parametrize(
    ("content", "like"),
    [
        (at(0, b"KDMV\1"), "a vmdk"),
        (at(0, b"# Disk DescriptorFile\n"), "a vmdk"),
        (at(0, b"conectix"), "a vhd"),
        (at(0, b"vhdxfile"), "a vhdx"),
        (at(0, b"QFI\xfb\0\0\0\3"), "a qcow2, whose name must end in .qcow2"),
        (at(0, b"<<< Oracle VM VirtualBox Disk Image >>>\n"), "a vdi"),
        (at(0, b"LUKS\xba\xbe"), "an encrypted disk (LUKS)"),
        (at(4086, b"SWAPSPACE2"), "swap space"),
        (at(0, b"QED\0\0\0\1\0"), "a qed"),
        (at(0, b"WithoutFreeSpace\2"), "a Parallels disk"),
        (at(0, b"PK\3\4"), "an archive or a compressed file"),
        (at(0, b"\xfd7zXZ\0"), "an archive or a compressed file"),
        (
            b"data/".ljust(257, b"\0") + b"ustar\0".ljust(8000, b"\0"),
            "an archive or a compressed file",
        ),
        (at(512, b"LABELONE"), "a volume of LVM"),
        (at(512, b"EFI PART"), "a partition table"),
        (at(510, b"\x55\xaa"), "a partition table"),
        (bytes(8192), "an empty disk: make a file system in it, as with mkfs.ext4"),
    ],
)
def test_disk_without_a_file_system_is_described_by_its_first_bytes(fake_root, content, like):
    fake_root.stub("mount", "#!/bin/sh\necho 'wrong fs type' >&2\nexit 32\n")
    fake_root.write("/sys/block/vdb/serial", "vtdata")
    fake_root.write("/dev/vdb", "")
    (fake_root.path / "dev/vdb").write_bytes(content)
    ran = fake_root.setup(PLAN, [Mount("disk", "vtdata", "/data")])
    assert ran.output == f"no file system found; the file begins like {like}\n"
    assert (ran.code, ran.steps[-1]) == (1, "mount /data")


@pytest.mark.parametrize(
    ("offset", "magic", "name"),
    [
        (0x10040, b"_BHRfS_M", "btrfs"),
        (0x10034, b"ReIsEr2Fs", "ReiserFS"),
        (0x8000, b"JFS1", "JFS"),
        (0x8001, b"CD001\1", "ISO 9660 or UDF"),
        (0, b"XFSB\0\0", "XFS"),
        (0, b"hsqs", "squashfs"),
        (3, b"NTFS    ".ljust(507, b"\0") + b"\x55\xaa", "NTFS"),
        (3, b"EXFAT   ".ljust(507, b"\0") + b"\x55\xaa", "exFAT"),
        (54, b"FAT16   ".ljust(456, b"\0") + b"\x55\xaa", "FAT"),
        (82, b"FAT32   ".ljust(428, b"\0") + b"\x55\xaa", "FAT"),
    ],
)
def test_unsupported_file_system_is_named(fake_root, offset, magic, name):
    fake_root.stub("mount", "#!/bin/sh\necho 'wrong fs type' >&2\nexit 32\n")
    fake_root.write("/sys/block/vdb/serial", "vtdata")
    fake_root.write("/dev/vdb", "")
    (fake_root.path / "dev/vdb").write_bytes(at(offset, magic) + bytes(1 << 17))
    ran = fake_root.setup(PLAN, [Mount("disk", "vtdata", "/data")])
    assert ran.output == (
        f"the disk has a file system ({name}) that this image cannot mount: wrong fs type; "
        "use ext4\n"
    )


@pytest.mark.parametrize(
    ("offset", "content"),
    [
        (1080, b"\x53\xef"),
        (4096, b"\xfc\x4e\x2b\xa9"),  # of a Linux RAID (md_p.h), after zeros
        (0x10000, b"\x01\x16\x19\x70"),  # GFS2
        (0, b"\x1f\x8b\x08\0"),  # no printable byte
    ],
)
def test_disk_with_unknown_content_is_not_reported_as_empty(fake_root, offset, content):
    fake_root.stub("mount", "#!/bin/sh\necho 'Structure needs cleaning' >&2\nexit 32\n")
    fake_root.write("/sys/block/vdb/serial", "vtdata")
    fake_root.write("/dev/vdb", "")
    (fake_root.path / "dev/vdb").write_bytes(at(offset, content) + bytes(1 << 17))
    ran = fake_root.setup(PLAN, [Mount("disk", "vtdata", "/data")])
    assert ran.output == (
        "the disk cannot be mounted: Structure needs cleaning; check the file, as with e2fsck -f\n"
    )


def test_disk_is_found_by_its_serial(fake_root: FakeRoot) -> None:
    fake_root.write("/sys/block/vda/serial", "vtseed")
    fake_root.write("/sys/block/vdb/serial", "vtdata")
    ran = fake_root.setup(PLAN, [HOME, Mount("disk", "vtdata", "/data")])
    assert ran.calls_of("mount")[0] == (
        "-o",
        "rw,nosuid,nodev",
        str(fake_root.path / "dev/vdb"),
        str(fake_root.path / "data"),
    )
    ran = fake_root.setup(PLAN, [HOME, Mount("disk", "other", "/data")])
    assert ran.output == "no disk has the serial other\n"


def test_devices_are_sorted_by_number(fake_root: FakeRoot) -> None:
    for number in (0, 2, 10):
        fake_root.write(f"/dev/infiniband/uverbs{number}", "")
    items = [
        HOME,
        GuestDevice("infiniband/uverbs*", "/dev/vtorque/second", nth=1),
        GuestDevice("infiniband/uverbs*", "/dev/vtorque/third", nth=2, owner="root"),
    ]
    ran = fake_root.setup(PLAN, items)
    assert ran.code == 0, ran.output
    links = {n: str((fake_root.path / "dev/vtorque" / n).readlink()) for n in ("second", "third")}
    devices = fake_root.path / "dev/infiniband"
    assert links == {"second": str(devices / "uverbs2"), "third": str(devices / "uverbs10")}
    assert ran.calls_of("chown") == [
        ("1000:1000", str(devices / "uverbs2")),
        ("0:0", str(devices / "uverbs10")),
    ]


def test_missing_device_is_named(fake_root: FakeRoot) -> None:
    fake_root.stub("sleep")
    ran = fake_root.setup(PLAN, [HOME, GuestDevice("infiniband/uverbs*", "/dev/x")])
    assert ran.code == 1
    assert ran.output == "no device 0 (from 0) of /dev/infiniband/uverbs* after 10 s\n"


def test_prologue_runs_with_the_jobs_facts_and_fails_the_start(fake_root: FakeRoot) -> None:
    text = b'#!/bin/sh\necho "$VTORQUE_JOBID $VTORQUE_USER $VTORQUE_RANK"\nexit 5\n'
    ran = fake_root.setup(PLAN, [HOME], prologue=[SiteScript("20-gpu", text)])
    assert ran.steps[-1] == "site prologue 20-gpu"
    assert ran.output.startswith("42.srv alice 0\n")
    assert ran.output.endswith("000: exit code 5\n")


@pytest.mark.parametrize("code", [0, 7])
def test_epilogue_waits_for_the_user_and_returns_its_exit_code(
    fake_root: FakeRoot, code: int
) -> None:
    done = fake_root.path.parent / "done"
    scripts = [
        SiteScript("first", f"#!/bin/sh\necho 'one\ntwo'\ntouch '{done}'\nexit {code}\n".encode()),
        SiteScript("second", b"#!/bin/sh\nprintf 'not run after a failure'\n"),
    ]
    assert fake_root.setup(PLAN, [HOME], epilogue=scripts).code == 0
    assert not done.exists()
    client = fake_root.read("/usr/lib/vtorque/site-epilogue")
    pipes = _escaped(fake_root.path / "run/vtorque-epilogue")
    asked = subprocess.run(
        [*fake_root.shell, "-c", client.replace("/run/vtorque-epilogue", f"'{pipes}'")],
        capture_output=True,
        timeout=180,
        check=False,
        **AS_NOBODY,
    )
    assert asked.returncode == code
    more = "" if code else "not run after a failure\n"
    assert asked.stdout.decode() == f"one\ntwo\n{more}"
    assert done.exists()


def test_cancellation_command_has_a_separate_agent(fake_root: FakeRoot, plan) -> None:
    fake_root.write("/usr/lib/vtorque/vtorque-agent", '#!/bin/sh\necho "$1" >"${0%/*}/started"\n')
    (fake_root.path / "usr/lib/vtorque/vtorque-agent").chmod(0o755)
    said = fake_root.path.parent / "said"
    items = [
        HOME,
        CancelCommand(("sh", "-c", f"echo $0 >{said}", "a b;c")),
        CancelCommand(("/no/such",)),
    ]
    assert fake_root.setup(PLAN, items).code == 0
    started = fake_root.path / "usr/lib/vtorque/started"
    until = time.monotonic() + LONG
    while not (started.exists() and started.read_text()) and time.monotonic() < until:
        time.sleep(0.01)
    assert started.read_text().endswith("/run/vtorque/cancel.conf\n")
    script = fake_root.path / "usr/lib/vtorque/on-cancel"
    subprocess.run([script], check=False, capture_output=True, timeout=180)
    assert (script.stat().st_mode & 0o777, said.read_text()) == (0o755, "a b;c\n")
    other = setup_script.build(plan(rank=1), items, Settings())["setup.sh"]
    assert b"on-cancel" not in other


def test_only_missing_packages_are_installed(fake_root: FakeRoot, plan) -> None:
    fake_root.stub(
        "dpkg-query",
        '#!/bin/sh\nfor name; do :; done\n[ "$name" = htop ] && echo "install ok installed"\n',
    )
    fake_root.stub("apt-get")
    fake_root.stub("apt-cache", "#!/bin/sh\nprintf '%s\\n' g++ g++-12 numactl\n")
    items = [HOME, Package("numactl", "debian"), Package("numactl-rpm", "redhat")]
    ran = fake_root.setup(
        plan(image=DEBIAN), items, settings=Settings(packages_debian=("htop", "g++"))
    )
    assert ran.code == 0, ran.output
    assert "packages" in ran.steps
    assert [call[-2:] for call in ran.calls_of("apt-get")] == [
        ("DPkg::Lock::Timeout=120", "update"),
        ("g++", "numactl"),
    ]


@pytest.mark.parametrize("name", ["numactl-", "numact.", "num"])
def test_package_name_that_apt_get_interprets_is_refused(fake_root: FakeRoot, plan, name) -> None:
    """An example is a package to remove (apt-get(8)), or a pattern."""
    fake_root.stub("dpkg-query", "#!/bin/sh\nexit 1\n")
    fake_root.stub("apt-get")
    fake_root.stub("apt-cache", "#!/bin/sh\nprintf '%s\\n' numactl\n")
    ran = fake_root.setup(plan(image=DEBIAN), [HOME, Package(name, "debian")])
    assert ran.code and f"there is no package {name}" in ran.output
    assert len(ran.calls_of("apt-get")) == 1, "apt-get install was called"


def test_missing_packages_are_installed_by_dnf(fake_root: FakeRoot, plan) -> None:
    fake_root.stub("rpm", "#!/bin/sh\nexit 1\n")
    fake_root.stub("dnf")
    ran = fake_root.setup(
        plan(image=ROCKY),
        [HOME, Package("numactl", "redhat")],
        settings=Settings(security_updates=True),
    )
    assert ran.calls_of("dnf") == [
        ("-q", "-y", "install", "numactl"),
        ("-q", "-y", "upgrade", "--security"),
    ]


@pytest.mark.parametrize("image", [MICRO, replace(ROCKY, distro="gentoo")])
def test_packages_are_refused_for_unsupported_images(plan, image) -> None:
    with pytest.raises(Refused, match=rf"package numactl .* image {image.name}"):
        setup_script.build(plan(image=image), [Package("numactl", "debian")], Settings())


def test_nfs_is_refused_in_micro(plan) -> None:
    with pytest.raises(Refused, match="no NFS client"):
        setup_script.build(plan(), [Mount("nfs", "srv:/x", "/x")], Settings())


def test_cloud_guest_allows_ssh_with_the_key_of_the_job_only(fake_root: FakeRoot, plan) -> None:
    fake_root.write("/etc/ssh/sshd_config", "PasswordAuthentication yes\n")
    ran = fake_root.setup(plan(image=DEBIAN), [HOME])
    assert ran.code == 0, ran.output
    sshd = fake_root.read("/etc/ssh/sshd_config")
    assert sshd.index("PasswordAuthentication no") < sshd.index("PasswordAuthentication yes")
    assert "PermitRootLogin no\n" in sshd
    own = "/etc/vtorque/ssh/alice"
    assert fake_root.mode(f"{own}/id_ed25519") == 0o600
    assert ("1000:1000", str(fake_root.path) + f"{own}/id_ed25519") in ran.calls_of("chown")
    assert fake_root.read("/etc/ssh/ssh_known_hosts").startswith("vn1,10.86.0.16 ssh-ed25519 ")
    config = fake_root.read("/etc/ssh/ssh_config.d/50-vtorque.conf")
    assert config.startswith("Host vn1 10.86.0.16 vn2 10.86.0.80\n")
    assert "StrictHostKeyChecking yes" in config
    assert ("try-restart", "ssh.service") in ran.calls_of("systemctl")
    assert "host name" not in ran.steps
    assert ran.calls_of("ip") == []


def test_sshd_with_an_include_directory_is_not_reconfigured(fake_root: FakeRoot, plan) -> None:
    text = "Include /etc/ssh/sshd_config.d/*.conf\n"
    fake_root.write("/etc/ssh/sshd_config", text)
    ran = fake_root.setup(plan(image=DEBIAN), [HOME])
    assert ran.code == 0, ran.output
    assert fake_root.read("/etc/ssh/sshd_config") == text
    assert ran.calls_of("systemctl") == []


def pci_device(root: FakeRoot, address: str, ids: str, regions: int = 3) -> None:
    vendor, device = ids.split(":")
    at = f"/sys/bus/pci/devices/{address}"
    for name, text in (("vendor", f"0x{vendor}\n"), ("device", f"0x{device}\n"), ("enable", "0")):
        root.write(f"{at}/{name}", text)
    for number in range(regions):
        root.write(f"{at}/resource{number}", "")


def test_memory_of_a_pci_device_is_linked_and_owned_by_the_user(fake_root: FakeRoot) -> None:
    pci_device(fake_root, "0000:00:02.0", "1af4:1005")
    pci_device(fake_root, "0000:02:01.0", "1af4:1110")
    pci_device(fake_root, "0000:02:02.0", "1af4:1110")
    items = [HOME, PciMemory("1af4:1110", 2, "/dev/vtorque/x", nth=1)]
    ran = fake_root.setup(PLAN, items)
    assert ran.code == 0, ran.output
    at = fake_root.path / "sys/bus/pci/devices/0000:02:02.0"
    assert (fake_root.path / "dev/vtorque/x").readlink() == at / "resource2"
    assert ran.calls_of("chown") == [("1000:1000", str(at / "resource2"))]
    assert (at / "enable").read_text() == "1\n"
    assert (at.with_name("0000:02:01.0") / "enable").read_text() == "0"


@pytest.mark.parametrize(
    ("item", "said"),
    [
        (PciMemory("1af4:1110", 2, "/dev/x", nth=1), "no PCI device 1af4:1110 number 1 (from 0)"),
        (PciMemory("1af4:1111", 2, "/dev/x"), "no PCI device 1af4:1111 number 0 (from 0)"),
        (PciMemory("1af4:1110", 4, "/dev/x"), "PCI device 0000:02:01.0 has no region 4"),
    ],
)
def test_missing_memory_of_a_pci_device_is_named(
    fake_root: FakeRoot, item: PciMemory, said: str
) -> None:
    pci_device(fake_root, "0000:02:01.0", "1af4:1110")
    ran = fake_root.setup(PLAN, [HOME, item])
    assert (ran.code, ran.output) == (1, f"{said}\n")


@pytest.mark.parametrize("device", ["", "1af4", "1AF4:1110", "1af4:*", "../x:1110", "1af4:11100"])
def test_invalid_pci_device_is_refused_before_the_boot(device: str) -> None:
    with pytest.raises(HostFault, match="is not a PCI device"):
        setup_script.build(PLAN, [PciMemory(device, 2, "/dev/x")], Settings())
