"""The image of a submitted value, and its disk."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from personal_site import PersonalSite
from vtorque_core.api import Image, JobRequest, Refused
from vtorque_core.api.libvirt_domain import Disk
from vtorque_own_images.node import tools_check, vtorque_render_domain
from vtorque_own_images.plugin import ROOT, vtorque_parse_args
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
    labels={"init": "micro"},
)
FILE = f"/home/ada/.cache/vtorque/images/{'a' * 64}.squashfs"
PERSONAL: Any = PersonalSite()


def request(value: str, *, root: bool = False) -> JobRequest:
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
    assert list(vtorque_render_domain(guest)) == [
        Disk("image", FILE, "raw", readonly=True, serial="vtown", user_owned=True)
    ]
    assert list(vtorque_render_domain(guest_plan(image=BASE))) == []


def test_own_image_on_site_with_administrator_is_refused_on_both_sides(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PersonalSite, "owner", 0)
    (refused,) = vtorque_parse_args(request(FILE), PERSONAL)
    assert "only on your own machine" in refused.message
    with pytest.raises(Refused, match="only on your own machine"):
        image(request(FILE), PERSONAL, pool)


def test_image_of_pool_is_not_refused() -> None:
    assert list(vtorque_parse_args(request("micro"), PERSONAL)) == []


def test_root_of_own_image_is_label_and_word_of_command_line() -> None:
    found = image(request(FILE, root=True), PERSONAL, pool)
    assert found.labels == {"init": "micro", "script": "root"}
    assert found.cmdline == "quiet vtorque.suid=1"


def test_root_without_own_image_is_refused_unless_it_is_the_default() -> None:
    wanted = request("micro", root=True)
    assert list(vtorque_parse_args(wanted, PERSONAL)) == []
    (refused,) = vtorque_parse_args(replace(wanted, given=frozenset({"root"})), PERSONAL)
    assert "only to your own image" in refused.message


@pytest.mark.parametrize(("value", "why"), [("true", "not supported yet"), ("yes", "unknown")])
def test_other_value_of_root_is_refused(value: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        ROOT.parse(value)
    assert ROOT.show(ROOT.parse("script")) == "script"


def test_doctor_names_packages_of_missing_tools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    (found,) = tools_check(PERSONAL)
    assert found.status == "warning"
    assert found.fix == "apt-get install skopeo squashfs-tools squashfs-tools-ng"


def test_doctor_reports_that_a_site_of_an_administrator_refuses_own_images(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PersonalSite, "owner", 0)
    (found,) = tools_check(PERSONAL)
    assert found.status == "ok" and "refused" in found.message
