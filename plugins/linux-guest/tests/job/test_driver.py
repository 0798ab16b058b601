"""The driver's elements, context and seed, and how it waits for a guest."""

from __future__ import annotations

import os
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from patience import with_more_time
from sample_guests import DEBIAN, MICRO, ROCKY
from vtorque_core.api import HostFault, Paths, Refused
from vtorque_core.api.guest_context import EnvVar, Mount, RootCommand
from vtorque_core.api.guest_plan import Share
from vtorque_core.api.libvirt_domain import Channel, Disk, Filesystem, KernelBoot
from vtorque_core.api.values import JobRequest
from vtorque_linux_guest.boot import seed_contents
from vtorque_linux_guest.boot.hardware import cmdline
from vtorque_linux_guest.boot.seed import Seed
from vtorque_linux_guest.job.driver import LinuxDriver
from vtorque_linux_guest.settings import Settings

DRIVER = LinuxDriver()


class DriverSite:
    """A site config with this plugin's settings only."""

    paths = Paths()

    def __init__(self, **settings: object) -> None:
        self.settings = Settings(**settings)  # type: ignore[arg-type]

    def __getitem__(self, kind: type) -> object:
        assert kind is Settings
        return self.settings


def of(items, kind):
    return [item for item in items if isinstance(item, kind)]


def test_ports_seed_and_shares(plan) -> None:
    shares = (
        Share("home", "/h/alice", "/home/alice", user_owned=True),
        Share("opt", "/opt", "/opt-hpc", readonly=True),
        Share("scratch", "srv:/scratch", "/scratch", kind="nfs"),
    )
    elements = list(DRIVER.elements(plan(image=DEBIAN, shares=shares), DriverSite()))
    assert [(c.port, c.path, c.owner) for c in of(elements, Channel)] == [
        ("org.vtorque.status", "/nonexistent/run/status.sock", "root"),
        ("org.vtorque.run", "/nonexistent/run/run.sock", "job"),
        ("org.vtorque.cancel", "/nonexistent/run/cancel.sock", "job"),
    ]
    assert of(DRIVER.elements(plan(rank=1), DriverSite()), Channel) == of(elements, Channel)
    assert of(elements, Disk) == [
        Disk("seed", "/nonexistent/state/seed.iso", format="raw", readonly=True, serial="vtseed")
    ]
    assert of(elements, Filesystem) == [
        Filesystem("home", "/h/alice", tag="home", user_owned=True),
        Filesystem("opt", "/opt", tag="opt", readonly=True),
    ]
    assert of(elements, KernelBoot) == []
    mounts = of(DRIVER.context(plan(image=DEBIAN, shares=shares), DriverSite()), Mount)
    assert mounts == [
        Mount("virtiofs", "home", "/home/alice"),
        Mount("virtiofs", "opt", "/opt-hpc", readonly=True),
        Mount("nfs", "srv:/scratch", "/scratch"),
    ]


def test_uefi_ignores_shares(plan) -> None:
    """UEFI would read variables from a file NvVars in a share, which other users can write."""
    shares = (Share("home", "/h/alice", "/home/alice", user_owned=True),)
    by_uefi = replace(DEBIAN, labels={**DEBIAN.labels, "firmware": "efi"})
    for image, is_ascii in (
        (DEBIAN, True), (by_uefi, False), (replace(by_uefi, kernel=Path("/k")), True),
        (replace(DEBIAN, arch="aarch64"), False),
    ):  # fmt: skip
        guest = plan(image=image, shares=shares)
        (shared,) = of(DRIVER.elements(guest, DriverSite()), Filesystem)
        assert shared.tag.isascii() == is_ascii
        mounts = of(DRIVER.context(guest, DriverSite()), Mount)
        assert [each.source for each in mounts] == [shared.tag]


def test_user_disk_is_attached_to_the_first_guest_only(plan) -> None:
    request = JobRequest({"disk": "/home/alice/data.raw"})
    first, second = plan(request=request), plan(request=request, rank=1)
    data = [d for d in of(DRIVER.elements(first, DriverSite()), Disk) if d.name == "data"]
    assert data == [
        Disk("data", "/home/alice/data.raw", format="raw", serial="vtdata", user_owned=True)
    ]
    assert Mount("disk", "vtdata", "/data") in list(DRIVER.context(first, DriverSite()))
    assert RootCommand(("chown", "1000:1000", "/data")) in list(DRIVER.context(first, DriverSite()))
    assert [d.name for d in of(DRIVER.elements(second, DriverSite()), Disk)] == ["seed"]
    assert [m.target for m in of(DRIVER.context(second, DriverSite()), Mount)] == ["/home/alice"]


def test_context_has_the_distro_variable(plan) -> None:
    assert EnvVar("DISTRO", "SLG") in list(DRIVER.context(plan(), DriverSite()))


def test_kernel_command_line_has_the_words_of_the_image() -> None:
    image = replace(MICRO, kernel=Path("/p/vmlinux"), initrd=Path("/p/initrd"), cmdline="quiet x=1")
    assert cmdline(image) == "console=ttyS0 panic=-1 cryptomgr.notests=1 quiet x=1"
    assert "ds=" not in cmdline(DEBIAN)


def test_kernel_of_the_image_is_booted_directly(plan) -> None:
    image = replace(MICRO, kernel=Path("/p/vmlinux"), initrd=Path("/p/initrd"))
    (boot,) = of(DRIVER.elements(plan(image=image), DriverSite()), KernelBoot)
    assert (boot.kernel, boot.initrd) == ("/p/vmlinux", "/p/initrd")


def test_seed_is_created_and_released(plan, tmp_path: Path) -> None:
    guest = plan(state_dir=tmp_path, run_dir=tmp_path, qemu_uid=os.geteuid())
    epilogue = tmp_path / "epilogue"
    epilogue.mkdir(mode=0o755)
    (epilogue / "10-x").write_text("#!/bin/sh\n")
    (epilogue / "10-x").chmod(0o755)
    items = list(DRIVER.context(guest, DriverSite()))
    (seed,) = DRIVER.resources(guest, items, DriverSite(prologue="/none", epilogue=str(epilogue)))
    assert isinstance(seed, Seed)
    seed.create()
    assert (tmp_path / "seed.iso").read_bytes()[0x8001:0x8006] == b"CD001"
    assert (tmp_path / "site-epilogue").exists()
    seed.release()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["epilogue"]


@pytest.mark.parametrize("writable", ["directory", "script"])
def test_scripts_that_others_can_write_are_refused(plan, tmp_path, writable) -> None:
    scripts = tmp_path / "prologue"
    scripts.mkdir(mode=0o755)
    (scripts / "10-x").write_text("#!/bin/sh\n")
    (scripts / "10-x").chmod(0o755)
    (scripts if writable == "directory" else scripts / "10-x").chmod(0o777)
    with pytest.raises(HostFault, match="users other than root can write"):
        DRIVER.resources(plan(), [], DriverSite(prologue=str(scripts), epilogue="/none"))


def test_script_that_is_a_link_is_refused(plan, tmp_path: Path) -> None:
    scripts = tmp_path / "prologue"
    scripts.mkdir(mode=0o755)
    (scripts / "10-x").symlink_to("/etc/passwd")
    with pytest.raises(HostFault, match="10-x"):
        DRIVER.resources(plan(), [], DriverSite(prologue=str(scripts), epilogue="/none"))


def test_agent_configuration_has_user_ports_and_paths(plan) -> None:
    text = seed_contents.agent_conf(plan(), []).decode()
    assert text == (
        "user=alice\nuid=1000\ngid=1000\ngroups=1000,2000\nhome=/home/alice\nshell=/bin/sh\n"
        "spool=/var/spool/vtorque\nstatus=port:org.vtorque.status\nrun=port:org.vtorque.run\n"
        "setup=/run/vtorque/setup.sh\nsync=0\n"
    )
    who = text.partition("status=")[0]
    assert seed_contents.cancel_conf(plan()).decode() == f"{who}run=port:org.vtorque.cancel\n"
    assert b"sync=1\n" in seed_contents.agent_conf(plan(), [Mount("disk", "vtdata", "/data")])


def test_agent_conf_cannot_be_extended_by_a_name(plan) -> None:
    user = replace(plan().user, home="/home/x", shell="/bin/sh\nuid=0")  # noqa: S604 - a field
    with pytest.raises(HostFault, match="shell"):
        seed_contents.agent_conf(plan(user=user), [])


@contextmanager
def guest_sending(path: Path, *lines: bytes) -> Iterator[None]:
    """A status port whose guest sends this and closes the connection."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path / "status.sock"))
    listener.listen(1)

    def serve() -> None:
        connection = listener.accept()[0]
        with connection:
            connection.recv(100)
            for line in lines:
                connection.sendall(line + b"\n")
            while lines and connection.recv(100):
                pass

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        thread.join(180)
        listener.close()


def test_steps_of_a_guest_are_reported_until_ready(plan, tmp_path: Path) -> None:
    seen: list[str] = []
    with guest_sending(tmp_path, b"STEP hosts", b"STEP mount /home/a", b"READY 1"):
        DRIVER.await_ready(plan(run_dir=tmp_path), time.monotonic() + 20, seen.append)
    assert seen == ["hosts", "mount /home/a"]


def test_failed_guest_reports_the_reason(plan, tmp_path: Path) -> None:
    line = b"FAILED mount /home/a: mount: tag not found"
    with (
        guest_sending(tmp_path, line),
        pytest.raises(HostFault, match="guest vn1: mount /home/a: mount: tag not found"),
    ):
        DRIVER.await_ready(plan(run_dir=tmp_path), time.monotonic() + 20, lambda _: None)


@pytest.mark.parametrize("step", ["mount /data", "command chown 1000:1000 /data"])
def test_unusable_user_disk_does_not_blame_the_node(plan, tmp_path, step) -> None:
    """Torque and Slurm requeued the job, then held it: two nodes were marked as faulty."""
    why = "no file system found; the file begins like a vmdk"
    with (
        guest_sending(tmp_path, f"FAILED {step}: {why}".encode()),
        pytest.raises(Refused, match=rf"disk=/scratch/d\.raw, in guest vn1: {step}: {why}"),
    ):
        request = JobRequest({"disk": "/scratch/d.raw"})
        guest = plan(
            run_dir=tmp_path, request=request, user=replace(plan().user, uid=1000, gid=1000)
        )
        DRIVER.await_ready(guest, time.monotonic() + 20, lambda _: None)


@pytest.mark.parametrize("disk", ["", "/scratch/d.raw"])
def test_failed_mount_of_a_share_is_a_host_fault(plan, tmp_path, disk) -> None:
    where = "/data" if not disk else "/home/a"
    with guest_sending(tmp_path, f"FAILED mount {where}: no".encode()), pytest.raises(HostFault):
        guest = plan(run_dir=tmp_path, request=JobRequest({"disk": disk}))
        DRIVER.await_ready(guest, time.monotonic() + 20, lambda _: None)


def test_guest_that_ends_during_boot_is_reported_as_dead(plan, tmp_path: Path) -> None:
    with guest_sending(tmp_path), pytest.raises(HostFault, match=r"guest vn1: .*died"):
        DRIVER.await_ready(plan(run_dir=tmp_path), time.monotonic() + 20, lambda _: None)


def test_silent_guest_names_the_last_step_and_the_limit(plan, tmp_path: Path) -> None:
    def attempt(seconds: float) -> None:
        here = tmp_path / f"{seconds}"
        here.mkdir()
        with (
            guest_sending(here, b"STEP packages"),
            pytest.raises(HostFault, match=r"last step: packages.*start_timeout"),
        ):
            DRIVER.await_ready(plan(run_dir=here), time.monotonic() + seconds, lambda _: None)

    with_more_time(attempt, 0.5, 5, 20)


def test_guest_that_never_started(plan, tmp_path: Path) -> None:
    with pytest.raises(HostFault, match=r"the guest died .*status\.sock"):
        DRIVER.await_ready(plan(run_dir=tmp_path), time.monotonic() + 1, lambda _: None)


def test_unmodified_cloud_image_cannot_be_a_spare_guest(plan) -> None:
    with pytest.raises(HostFault, match="agent=builtin"):
        DRIVER.await_warm(plan(image=ROCKY), time.monotonic() + 10)


@pytest.mark.parametrize(
    ("leads_to", "is_alias"),
    [
        ("/etc/systemd/system.conf.d", False),
        ("/root/.ssh", False),
        ("/lib64/x", False),
        ("/var/lib/cloud/scripts/per-boot", False),
        ("/var/home/u", True),
        ("/etcetera/u", True),
    ],
)
def test_alias_is_never_in_a_system_directory(plan, leads_to: str, is_alias: bool) -> None:
    """A link there to a directory of the user would give the user root in the guest."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        work = f"{name}/work"
        Path(work).symlink_to(leads_to)
        found = seed_contents.find_aliases(replace(plan(), shares=(Share("work", work, work),)))
    real = os.path.realpath(leads_to)
    assert (real in found) == is_alias


def test_aliases_of_home_and_shares_resolve_to_their_targets(plan) -> None:
    """Aliases are the home's path in the user database, and paths without symbolic links."""
    with tempfile.TemporaryDirectory() as name:
        top = Path(name).resolve()
        top.chmod(0o755)
        for real in ("data", "scratch"):
            (top / real).mkdir(mode=0o755)
        (top / "home").symlink_to("data")
        (top / "work").symlink_to("scratch")
        home, work = str(top / "home"), str(top / "work")
        shares = (
            Share("home", home, "/home/alice", user_owned=True),
            Share("work", work, work),
            Share("tools", str(top / "scratch"), "/opt-hpc"),
            Share("far", "server:/far", "/far", kind="nfs"),
        )
        user = replace(plan().user, home=home)
        assert seed_contents.find_aliases(replace(plan(), user=user, shares=shares)) == {
            home: "/home/alice", f"{top}/data": "/home/alice", f"{top}/scratch": work,
        }  # fmt: skip
    plain = replace(plan().user, home="/home/alice")
    same = (Share("home", "/home/alice", "/home/alice", user_owned=True),)
    assert seed_contents.find_aliases(replace(plan(), user=plain, shares=same)) == {}
