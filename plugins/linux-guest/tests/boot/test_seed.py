"""The seed as a guest would read it, and as a resource."""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from io import BytesIO
from pathlib import Path

import pycdlib
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sample_guests import MICRO, ROCKY
from vtorque_core.api import HostFault
from vtorque_core.api.libvirt_domain import Filesystem
from vtorque_linux_guest.boot import seed_contents
from vtorque_linux_guest.boot.hardware import elements
from vtorque_linux_guest.boot.seed import Seed, iso
from vtorque_linux_guest.settings import Settings

NAMES = st.text("abcdefghijklmnopqrstuvwxyz0123456789.-_", min_size=1, max_size=40).filter(
    lambda n: n.strip(".")
)
CONTENT = st.one_of(st.binary(max_size=5000), st.sampled_from([b"", b"x" * 2048, b"y" * 2049]))


def read(image: bytes, path: str, kind: str) -> bytes:
    opened = pycdlib.PyCdlib()
    opened.open_fp(BytesIO(image))
    out = BytesIO()
    opened.get_file_from_iso_fp(out, **{kind: f"/{path}"})
    opened.close()
    return out.getvalue()


@given(st.dictionaries(NAMES, CONTENT, max_size=8), st.dictionaries(NAMES, CONTENT, max_size=8))
def test_every_file_reads_back_under_both_name_systems(top: dict, inner: dict) -> None:
    files = dict(top) | {f"vtorque-dir/files/{name}": data for name, data in inner.items()}
    files.pop("vtorque-dir", None)
    image = iso(files)
    for path, content in files.items():
        assert read(image, path, "rr_path") == content
        assert read(image, path, "joliet_path") == content


def test_seed_has_the_nocloud_label_and_is_readable_by_root_only() -> None:
    opened = pycdlib.PyCdlib()
    opened.open_fp(BytesIO(iso({"user-data": b"x", "vtorque/setup.sh": b"y"})))
    assert opened.pvd.volume_identifier.rstrip() == b"cidata"
    assert opened.joliet_vd.volume_identifier.decode("utf-16-be").rstrip() == "cidata"
    for path, mode in (
        ("/user-data", 0o100600),
        ("/vtorque", 0o040700),
        ("/vtorque/setup.sh", 0o100600),
    ):
        assert opened.get_record(rr_path=path).rock_ridge.get_file_mode() == mode
    opened.close()


def test_name_too_long_for_joliet_is_an_error() -> None:
    with pytest.raises(HostFault, match="64 characters"):
        iso({"n" * 65: b""})


def test_seed_of_a_cloud_guest_has_both_parts(plan, tmp_path: Path) -> None:
    agent = tmp_path / "agent.x86_64"
    agent.write_bytes(b"\x7fELF the agent")
    files = seed_contents.seed_files(
        plan(image=ROCKY), [], Settings(agent=str(tmp_path / "agent.{arch}"))
    )
    image = iso(files)
    assert read(image, "user-data", "joliet_path").startswith(b"#cloud-config\n")
    assert read(image, "vtorque/vtorque-agent", "rr_path") == b"\x7fELF the agent"
    assert {"meta-data", "network-config", "vtorque/agent.conf", "vtorque/setup.sh"} <= set(files)


def test_seed_of_own_image_has_nothing_of_the_site(plan, tmp_path: Path) -> None:
    site = {}
    for what in ("prologue", "epilogue", "precancel"):
        (tmp_path / what).mkdir()
        (tmp_path / what / "10-site").write_text("#!/bin/sh\nSECRET OF THE SITE\n")
        site[what] = str(tmp_path / what)
    (tmp_path / "cloud").mkdir()
    (tmp_path / "cloud/10.cfg").write_text("#cloud-config\nruncmd: [SECRET OF THE SITE]\n")
    settings = Settings(cloud_config=str(tmp_path / "cloud"), **site)
    own = plan(image=replace(MICRO, name="own:0123", source="/home/alice/image"))
    disk = plan(image=replace(own.image, kernel=None, labels={"init": "cloud-init"}))
    (tmp_path / "agent").touch()
    of_image = replace(settings.for_image(own.image), agent=str(tmp_path / "agent"))
    found, of_disk = (seed_contents.seed_files(each, [], of_image) for each in (own, disk))
    assert sorted(name for name in of_disk.keys() - found if "/files/" not in name) == [
        "meta-data", "network-config", "user-data", "vtorque/vtorque-agent",
    ]  # fmt: skip
    assert sorted(found) == [
        "vtorque/agent.conf",
        "vtorque/files/0000",  # what sudo refuses the user
        "vtorque/ids/group",
        "vtorque/ids/passwd",
        "vtorque/ids/passwd.sh",
        "vtorque/ids/shadow",
        "vtorque/setup.sh",
    ]
    assert not any(b"SECRET" in content for content in [*found.values(), *of_disk.values()])
    assert settings.for_image(MICRO) is settings


@pytest.mark.parametrize(
    ("source", "script", "root"),
    [
        ("", "root", "other"), ("", "sudo", "other"), ("/f", "", "other"), ("/f", "x", "other"),
        ("/f", "root", "user"), ("/f", "sudo", "both"),
    ],
)  # fmt: skip
def test_only_own_image_with_the_label_gives_root(plan, source, script, root) -> None:
    guest = plan(image=replace(MICRO, source=source, labels={**MICRO.labels, "script": script}))
    assert seed_contents.agent_conf(guest, []).count(b"\nroot=1\n") == (root == "user")
    shares = [each for each in elements(guest) if isinstance(each, Filesystem)]
    assert [each.guest_root for each in shares] == [root]
    rules = [
        text for text in seed_contents.seed_files(guest, [], Settings()).values() if b"ALL" in text
    ]
    assert any(b"NOPASSWD: ALL" in text for text in rules) == (root == "both")
    assert any(b"!ALL" in text for text in rules) == (root != "both")


def test_missing_agent_names_image_path_and_key(plan) -> None:
    with pytest.raises(HostFault, match=r"rocky9.*/nonexistent/agent.*\[plugin.linux-guest\]"):
        seed_contents.seed_files(plan(image=ROCKY), [], Settings(agent="/nonexistent/agent"))


def test_seed_of_a_micro_guest_has_no_cloud_init_files(plan) -> None:
    files = seed_contents.seed_files(plan(), [], Settings(prologue="/nonexistent"))
    assert all(path.startswith("vtorque/") for path in files)


def test_create_makes_a_private_file_and_release_can_be_repeated(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    seed = Seed(str(tmp_path / "seed.iso"), os.geteuid(), str(marker), b"secret")
    seed.create()
    status = (tmp_path / "seed.iso").stat()
    assert (stat.S_IMODE(status.st_mode), status.st_uid) == (0o400, os.geteuid())
    assert (tmp_path / "seed.iso").read_bytes() == b"secret"
    assert stat.S_IMODE(marker.stat().st_mode) == 0o444
    Seed(seed.path, seed.owner, seed.marker).release()
    seed.release()
    assert list(tmp_path.iterdir()) == []


def test_create_replaces_a_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_bytes(b"kept")
    (tmp_path / "seed.iso").symlink_to(victim)
    Seed(str(tmp_path / "seed.iso"), os.geteuid(), "", b"secret").create()
    assert victim.read_bytes() == b"kept"
    assert not (tmp_path / "seed.iso").is_symlink()


def test_create_without_its_directory_is_a_host_fault(tmp_path: Path) -> None:
    with pytest.raises(HostFault, match=r"seed: .*No such file"):
        Seed(str(tmp_path / "gone/seed.iso"), 0, "", b"x").create()


def test_contents_are_not_shown() -> None:
    assert "secret" not in repr(Seed("/a", 0, "", b"secret"))
