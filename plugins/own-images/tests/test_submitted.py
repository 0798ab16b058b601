"""The image of a submitted value, and its disk."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from personal_site import PersonalSite
from vtorque_core.api import HostFault, Image, JobRequest, Refused, vm_options
from vtorque_core.api.guest_context import RootCommand
from vtorque_core.api.libvirt_domain import Disk
from vtorque_own_images import pull, submitted_image
from vtorque_own_images.node import (
    tools_check,
    vtorque_guest_context,
    vtorque_plan,
    vtorque_render_domain,
)
from vtorque_own_images.plugin import ALLOWED, ROOT, vtorque_parse_args
from vtorque_own_images.submitted_image import image
from vtorque_testing.planned import guest_plan

BASE = Image(
    "own",
    "linux",
    "container",
    "x86_64",
    "0" * 64,
    disk=Path("/pool/own/root.qcow2"),
    kernel=Path("/pool/own/vmlinux"),
    initrd=Path("/pool/own/initrd"),
    cmdline="quiet",
    labels={"init": "micro", "sudo": "yes"},
)
FILE = f"/home/ada/.cache/vtorque/images/{'a' * 64}.squashfs"
PERSONAL: Any = PersonalSite()


def request(value: str, *, root: str = "") -> JobRequest:
    return JobRequest({"img": value, "root": root, "work": ""})


def pool(name: str) -> Image:
    assert name == "own"
    return BASE


def test_own_image_differs_from_base_only_in_name_and_source() -> None:
    found = image(request(FILE), PERSONAL, pool)
    assert found == replace(BASE, name="own:" + "a" * 12, source=FILE)


@pytest.mark.parametrize(
    "value",
    [
        "/etc/passwd",
        "docker://debian:12",
        f"/home/ada/{'a' * 63}.squashfs",
        f"/home/ada/../root/{'a' * 64}.squashfs",
        f"home/{'a' * 64}.squashfs",
        f"/home/ada/{'a' * 64}.squashfs\n",
        f"/home/a\tda/{'a' * 64}.squashfs",
        f"/{'x' * 1024}/{'a' * 64}.squashfs",
    ],
)
def test_other_value_on_node_is_refused(value: str) -> None:
    with pytest.raises(Refused):
        image(request(value), PERSONAL, pool)


def test_own_image_is_read_only_disk_that_a_daemon_of_the_user_serves() -> None:
    guest = guest_plan(image=image(request(FILE), PERSONAL, pool))
    assert list(vtorque_render_domain(guest, PERSONAL)) == [
        Disk("image", FILE, "raw", readonly=True, serial="vtown", user_owned=True)
    ]
    assert list(vtorque_render_domain(guest_plan(image=BASE), PERSONAL)) == []


def test_own_image_on_site_with_administrator_is_refused_on_both_sides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PersonalSite, "owner", 0)
    (refused,) = vtorque_parse_args(request(FILE), PERSONAL)
    assert "which this site does not accept" in refused.message
    with pytest.raises(Refused, match="which this site does not accept"):
        image(request(FILE), PERSONAL, pool)


def test_image_of_pool_is_not_refused() -> None:
    assert list(vtorque_parse_args(request("micro"), PERSONAL)) == []


def test_root_of_own_image_is_label_and_word_of_command_line() -> None:
    found = image(request(FILE, root="script"), PERSONAL, pool)
    assert found.labels == {**BASE.labels, "script": "root"}
    assert found.cmdline == "quiet vtorque.suid=1"
    assert found.name == f"own:{'a' * 12},root=script"
    assert list(vtorque_guest_context(guest_plan(image=found))) == []


def test_sudo_in_own_image_is_label_and_command_of_guest() -> None:
    found = image(request(FILE, root="true"), PERSONAL, pool)
    assert found.labels == {**BASE.labels, "script": "sudo"}
    assert found.cmdline == "quiet vtorque.suid=1"
    (command,) = vtorque_guest_context(guest_plan(image=found))
    assert command == RootCommand(("/usr/lib/vtorque/install-sudo",), "boot")
    of_pool = replace(found, source="")
    assert list(vtorque_guest_context(guest_plan(image=of_pool))) == []


@pytest.mark.parametrize(
    ("words", "root", "count"),
    [("--translate-uid", "true", 0), ("-o sandbox", "true", 1), ("-o sandbox", "script", 0)],
)
def test_sudo_needs_virtiofsd_that_translates_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, root: str, count: int
) -> None:
    program = tmp_path / "virtiofsd"
    program.write_text(f"#!/bin/sh\necho '{words}'\n")
    program.chmod(0o755)
    monkeypatch.setattr("vtorque_core.live.node_setup.VIRTIOFSD", str(program))
    wanted = request(FILE, root=root)
    guest = guest_plan(image=image(wanted, PERSONAL, pool), request=wanted)
    refused = list(vtorque_plan(guest, PERSONAL))
    assert len(refused) == count
    assert all("virtiofsd 1.13" in each.message and "root=script" in each.fix for each in refused)
    if count:
        with pytest.raises(Refused, match="root=script"):
            pull.resolve_request(wanted, PERSONAL, True)


@pytest.mark.parametrize(("uid", "count"), [(0, None), (1000, 1)])
def test_virtiofsd_that_fails_as_a_user_is_an_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uid: int, count: int | None
) -> None:
    """The one of Debian 12 cannot drop the groups of a user."""
    program = tmp_path / "virtiofsd"
    program.write_text("#!/bin/sh\necho setgroups failed >&2; exit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr("vtorque_core.live.node_setup.VIRTIOFSD", str(program))
    monkeypatch.setattr(submitted_image.os, "geteuid", lambda: uid)
    wanted = request(FILE, root="true")
    if count is None:
        with pytest.raises(HostFault, match="setgroups failed"):
            submitted_image.refuse_sudo(wanted)
        return
    assert submitted_image.refuse_sudo(wanted) is not None
    program.unlink()  # a submit host may have none
    assert submitted_image.refuse_sudo(wanted) is None


def test_base_image_alone_is_refused() -> None:
    (refused,) = vtorque_plan(guest_plan(image=BASE, request=request("own")), PERSONAL)
    assert "only the base of users' own images" in refused.message


def test_sudo_with_older_base_image_is_refused() -> None:
    with pytest.raises(Refused, match="vmgr images build own own"):
        image(request(FILE, root="true"), PERSONAL, lambda _: replace(BASE, labels={}))


def test_root_without_own_image_is_refused_unless_it_is_the_default() -> None:
    wanted = request("micro", root="script")
    assert list(vtorque_parse_args(wanted, PERSONAL)) == []
    (refused,) = vtorque_parse_args(replace(wanted, given=frozenset({"root"})), PERSONAL)
    assert "only to your own image" in refused.message


@pytest.mark.parametrize("value", ["yes", "", "True", "sudo"])
def test_other_value_of_root_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match="unknown"):
        ROOT.parse(value)
    for known in ("none", "script", "true"):
        assert ROOT.show(ROOT.parse(known)) == known


def test_doctor_names_packages_of_missing_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    (found,) = tools_check(PERSONAL)
    assert found.status == "warning"
    assert found.fix == "apt-get install skopeo squashfs-tools zstd squashfs-tools-ng"


def test_doctor_reports_that_a_site_of_an_administrator_refuses_own_images(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PersonalSite, "owner", 0)
    (found,) = tools_check(PERSONAL)
    assert found.status == "ok" and "refused" in found.message


@pytest.mark.parametrize(
    ("key", "value"),
    [("pci", "gpu:1"), ("vrdma", True), ("unclot", True), ("unclot_shmem", 64), ("of_site", "")],
)
def test_own_image_gets_no_device_and_no_unknown_option(key: str, value: object) -> None:
    own = request(FILE)
    wanted = replace(own, values={**own.values, key: value}, given=frozenset({key}))
    (refused,) = vtorque_parse_args(wanted, PERSONAL)
    assert refused.key == key and "not available for your own image" in refused.message
    enabled_by_site = replace(wanted, given=frozenset())
    refusals = list(vtorque_parse_args(enabled_by_site, PERSONAL))
    assert len(refusals) == (key in ("pci", "vrdma", "unclot"))
    of_pool = replace(wanted, values={**wanted.values, "img": "micro"})
    assert list(vtorque_parse_args(of_pool, PERSONAL)) == []


def test_each_option_is_either_allowed_or_refused_for_own_images() -> None:
    modules = [vm_options, *(each.load() for each in entry_points(group="vtorque1"))]
    hooks = [each.vtorque_options for each in modules if hasattr(each, "vtorque_options")]
    known = {option.key for hook in hooks for option in hook()}
    assert known >= ALLOWED
    assert known - ALLOWED == {
        "cloud_config", "iocm", "iocm_max_cores", "iocm_min_cores", "osv_mode", "pci", "snap",
        "unclot", "unclot_shmem", "vrdma",
    }  # fmt: skip
