"""Compare file operations in a guest's share with the same operations on the node; as root."""

import contextlib
import functools
import os
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

import daemons
import file_operations
from bare_guest import OTHER, PROJECT, USER, guest, share, unpack_kernel
from daemons import make
from file_operations import DIFFERENCES, OPERATIONS
from vtorque_core.resources import user_daemon
from vtorque_linux_guest.node import _CLEAN

pytestmark = [pytest.mark.e2e, pytest.mark.full, pytest.mark.releases]

PROGRAM = Path(file_operations.__file__)
INIT = """#!/bin/busybox sh
/bin/busybox --install -s /bin
export PATH=/bin
mount -t proc proc /proc; mount -t devtmpfs dev /dev; mount -t tmpfs tmp /tmp
for m in @MODULES@; do insmod /modules/$m.ko; done
mkdir /usr; ln -s usr/lib usr/lib64 /
mount -t virtiofs home /home && mount -t virtiofs opt /usr || echo "cannot mount the shares"
su -s /bin/sh user -c '/usr/bin/python3 -BI /home/ops.py /home/place' 2>&1
/usr/bin/python3 -BI /home/root.py 2>&1
mkdir -p /home/place/s1/of_root/inner; touch /home/place/s1/of_root/inner/file
sh /home/clean.sh /home/place @USER@:@USER@
echo "@@ end"
poweroff -f
"""
# Root in the guest tries to set these attributes on a file of the user and on a file of root.
ATTACK = """
import os, struct
open("/home/roots", "w").close()
capability = struct.pack("<5I", 0x02000001, 1 << 7, 0, 1 << 7, 0)
acl = struct.pack("<I" + 3 * "HHI", 2, 1, 7, 2**32 - 1, 4, 7, 2**32 - 1, 32, 7, 2**32 - 1)
values = {
    "security.capability": capability, "security.selinux": b"x", "security.ima": b"x",
    "trusted.overlay.opaque": b"y", "trusted.overlay.redirect": b"/etc", "trusted.a": b"1",
    "system.posix_acl_access": acl, "system.posix_acl_default": acl, "system.nfs4_acl": b"1",
    "user.a": b"1", "": b"1", "user": b"1", "virtiofs.user.a": b"1", "security.": b"1",
}
for path in ("/home/roots", "/home/users"):
    for name, value in values.items():
        try:
            os.setxattr(path, name, value)
        except OSError as error:
            continue
        print("set", path, name)
    print("listed", path, *os.listxattr(path))
"""
# Results that the node must have. Without attributes and ACLs it would not differ from a guest.
REQUIRED_ON_NODE = {
    "files_of_two_file_systems_differ": "(True, False)",
    "user_attribute": r"((b'text\x00\xff', ['user.note']), 'ENODATA', [])",
    "acl_entry_of_the_user_opens": repr("f0640\n"),
    "acl_entry_of_a_colleague_blocks_nobody_else": (
        r"(['of_group\n', 'of_all\n', 'mine\n'], '-rw-rw----')"
    ),
    "acl_default_ignores_the_umask": "['-rw-rw----', 'drwxrws---']",
}


def run(*command: str | Path) -> None:
    subprocess.run(command, check=True, timeout=180)


def prepare(place: Path) -> None:
    """Create ``place``, its parent directory for the user, and the files of the operations.

    ``s1``, ``s2`` and ``bound`` are mounts. Files in the first two have the same inode numbers.
    """
    place.parent.mkdir()
    os.chown(place.parent, USER, USER)
    make(place, None, 0o755, USER, USER)
    for number in "12":
        inner = place / f"s{number}"
        make(inner, None, 0o755, USER, USER)
        options = f"uid={USER},gid={USER},mode=755,size={number}M"
        run("mount", "-t", "tmpfs", "-o", options, "tmpfs", inner)
        make(inner / "one.txt", f"s{number}\n", 0o644, USER, USER)
        os.link(inner / "one.txt", inner / "two.txt")
    make(place / "bound", "", 0o644, USER, USER)
    run("mount", "--bind", place / "s1/one.txt", place / "bound")
    make(place / "rootfile", "root's\n", 0o644, 0, 0)
    make(place / "sticky", None, 0o1777, 0, 0)
    make(place / "sticky/of_root", "", 0o666, 0, 0)
    lists = {
        "f0640": (0o640, 0, 0, USER), "of_group": (0o640, 0, PROJECT, OTHER),
        "of_all": (0o644, 0, 0, OTHER), "mine": (0o640, USER, USER, OTHER),
    }  # fmt: skip
    for name, (mode, owner, group, entry) in lists.items():
        make(place / name, f"{name}\n", mode, owner, group)
        run("setfacl", "-m", f"u:{entry}:rw", place / name)
    make(place / "proj", None, 0o2770, USER, PROJECT)
    run("setfacl", "-d", "-m", f"u:{OTHER}:rwx", place / "proj")


@dataclass(frozen=True)
class Comparison:
    """The operations' results on the node and in the guest, and all lines of the guest."""

    place: Path
    node: dict[str, str]
    guest: dict[str, str]
    lines: list[str]


@pytest.fixture(scope="module")
def comparison() -> Iterator[Comparison]:
    """Run the operations in two equal directories: on the node, and in one guest."""
    with daemons.place_for(user_daemon.stop) as place, contextlib.ExitStack() as stack:
        made = [place / name / "place" for name in ("node", "home")]
        for each in made:
            for name in ("s1", "s2", "bound"):
                unmount = ["umount", "-l", each / name]
                stack.callback(subprocess.run, unmount, check=False, timeout=180)
            prepare(each)
        (place / "home/ops.py").write_text(PROGRAM.read_text())
        (place / "home/root.py").write_text(ATTACK)
        (place / "home/clean.sh").write_text(_CLEAN)
        make(place / "home/users", "", 0o644, USER, USER)
        node, lines = run_on_node(made[0]), run_in_guest(place)
        yield Comparison(place / "home", node, results(lines), lines)


def run_on_node(place: Path) -> dict[str, str]:
    """Run the operations as the user on the node."""
    program = place.parents[1] / "home/ops.py"
    done = subprocess.run(
        ["/usr/bin/python3", "-BI", program, place], check=True, timeout=180,
        stdout=subprocess.PIPE, text=True, user=USER, group=USER, extra_groups=[USER, PROJECT],
        env={"PATH": "/bin"}, umask=0o022,
    )  # fmt: skip
    return results(done.stdout.splitlines())


def run_in_guest(place: Path) -> list[str]:
    """Run the operations as the user in a guest with the share; return the guest's lines."""
    shares = [share(place, "home"), replace(share(place, "opt"), source="/usr")]
    for each in shares:
        each.start()
    with guest(unpack_kernel(), place, INIT.replace("@USER@", str(USER))) as qemu:
        assert qemu.stdout is not None
        signal.signal(signal.SIGALRM, lambda *_: qemu.kill())
        signal.alarm(300)
        lines = list(iter(functools.partial(_read_line, qemu.stdout), "@@ end"))
        signal.alarm(0)
    return lines


def _read_line(console: Iterator[str]) -> str:
    return next(console, "@@ end").rstrip()


def results(lines: list[str]) -> dict[str, str]:
    found = dict(line.split("\t", 1) for line in lines if "\t" in line)
    assert list(found) == list(OPERATIONS), "\n".join(lines)
    return found


def test_file_operations_in_a_guest_match_the_node(comparison: Comparison) -> None:
    """Print all differences; they must be exactly those in ``DIFFERENCES``."""
    differ = {name for name in OPERATIONS if comparison.node[name] != comparison.guest[name]}
    for name in sorted(differ):
        print(f"{name}\n  node   {comparison.node[name]}\n  guest  {comparison.guest[name]}")  # noqa: T201
    assert {name: comparison.node[name] for name in REQUIRED_ON_NODE} == REQUIRED_ON_NODE
    assert differ == set(DIFFERENCES)


def test_guest_root_sets_user_attributes_only(comparison: Comparison) -> None:
    said = [line for line in comparison.lines if line.startswith(("set ", "listed "))]
    paths = ("/home/roots", "/home/users")
    assert said == [f"{word} {path} user.a" for path in paths for word in ("set", "listed")]
    found = {name: os.listxattr(comparison.place / name) for name in ("roots", "users")}
    assert found == {"roots": ["user.a"], "users": ["user.a"]}


def test_vmgr_clean_crosses_file_systems_of_a_share(comparison: Comparison) -> None:
    assert (comparison.place / "place/s1/one.txt").exists()
    assert not (comparison.place / "place/s1/of_root").exists()
