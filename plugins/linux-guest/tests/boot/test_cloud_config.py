"""Fragments of cloud-config that a guest gets from its image and the site."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sample_guests import DEBIAN, MICRO, FakeRoot
from vtorque_core.api import HostFault, Image, Refused
from vtorque_linux_guest.boot.cloud_config import fragments
from vtorque_linux_guest.boot.cloud_config_check import check
from vtorque_linux_guest.settings import Settings

OWN = '{"packages": ["gdb"]}'


def labelled(image: Image, value: str) -> Image:
    return replace(image, labels={**image.labels, "cloud-config": value})


@pytest.fixture
def site(tmp_path: Path) -> Settings:
    (tmp_path / "20-b.cfg").write_text("#cloud-config\nb: 1\n")
    (tmp_path / "10-a.cfg").write_text("#cloud-config\na: 1\n")
    return Settings(cloud_config=str(tmp_path))


def test_fragments_of_the_image_precede_those_of_the_site(site: Settings) -> None:
    assert fragments(DEBIAN, Settings(cloud_config="/none")) == ()
    sites = ("#cloud-config\na: 1\n", "#cloud-config\nb: 1\n")
    assert fragments(DEBIAN, site) == sites
    assert fragments(labelled(DEBIAN, OWN), site) == (f"#cloud-config\n{OWN}\n", *sites)
    assert fragments(labelled(DEBIAN, "none"), site) == ()


def test_image_without_cloud_init_is_refused_with_a_fix(site: Settings) -> None:
    none = Settings(cloud_config="/none")
    with pytest.raises(
        Refused,
        match="choose another image, or ask the admin to run: vmgr images label micro",
    ):
        fragments(MICRO, site)
    with pytest.raises(Refused, match="image micro has no cloud-init for the label cloud-config"):
        fragments(labelled(MICRO, OWN), none)
    assert fragments(MICRO, none) == fragments(labelled(MICRO, "none"), site) == ()


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"packages: []\n", "does not begin with"), (b"#cloud-config\n\xff\n", "is not UTF-8")],
)
def test_file_that_cloud_init_would_skip_is_refused(
    tmp_path: Path, content: bytes, says: str
) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(HostFault, match=f"x {says}"):
        fragments(DEBIAN, Settings(cloud_config=str(tmp_path)))


def test_doctor_checks_the_fragments(tmp_path: Path, site: Settings) -> None:
    (tmp_path / "30-list").write_text("#cloud-config\n- a\n")
    (tmp_path / "40-bad").write_text("#cloud-config\n{\n")
    found = list(check({Settings: site}))  # type: ignore[arg-type]
    assert [result.status for result in found] == ["ok", "ok", "failed", "failed"]
    assert (
        "is not a YAML mapping of modules" in found[2].message
        and "is not valid YAML" in found[3].message
    )


@pytest.mark.parametrize("builtin", [True, False])
def test_guest_validates_cloud_config_with_its_schema(fake_root: FakeRoot, plan, builtin) -> None:
    """Images of the site then run the remaining modules; in other images cloud-init does that."""
    fake_root.stub("cloud-init")
    image = DEBIAN if builtin else replace(DEBIAN, labels={})
    ran = fake_root.setup(plan(image=image), cloud_config=True)
    assert ran.code == 0, ran.output
    schema, *stages = ran.calls_of("cloud-init")
    assert schema[-3:-1] == ("schema", "--config-file")
    assert [stage[-1] for stage in stages] == ["--mode=config", "--mode=final"] * builtin
    fake_root.stub("cloud-init", "#!/bin/sh\necho no such key; exit 1\n")
    ran = fake_root.setup(plan(image=image), cloud_config=True)
    assert ran.code != 0 and "no such key" in ran.output and ran.steps[-1] == "cloud-config"
