"""Values of ``-vm img=`` for users' own images."""

from __future__ import annotations

from pathlib import Path

import pytest

from vtorque_core.api import Refused
from vtorque_own_images.reference import parse

DIGEST = "sha256:" + "a" * 64


@pytest.mark.parametrize(
    ("written", "kind", "skopeo"),
    [
        ("docker://debian", "docker", "docker://debian"),
        ("docker://debian:12", "docker", "docker://debian:12"),
        ("docker://r.example.org:5000/a/b:1.4", "docker", "docker://r.example.org:5000/a/b:1.4"),
        (f"docker://r/a:1@{DIGEST}", "docker", f"docker://r/a@{DIGEST}"),
        ("oci:./layout:tag", "oci", "oci:/work/layout:tag"),
        ("oci:/images/layout", "oci", "oci:/images/layout"),
        ("docker-archive:app.tar", "docker-archive", "docker-archive:/work/app.tar"),
    ],
)
def test_reference_of_known_kind_has_name_for_skopeo(written: str, kind: str, skopeo: str) -> None:
    found = parse(written, Path("/work"))
    assert (found.kind, found.skopeo_name) == (kind, skopeo)


def test_reference_at_digest_omits_tag() -> None:
    found = parse("docker://r/a:1", Path("/")).with_digest("b" * 64)
    assert found.skopeo_name == "docker://r/a@sha256:" + "b" * 64
    assert found.written == "docker://r/a:1"


def test_reference_to_sif_is_a_path() -> None:
    assert parse("./app.sif", Path("/work")).place == "/work/app.sif"


@pytest.mark.parametrize(
    ("written", "why"),
    [
        ("docker://", "not the name of an image in a registry"),
        ("docker://-x", "not the name of an image in a registry"),
        ("docker://r/a --all", "not the name of an image in a registry"),
        ("./disk.img", "neither the name"),
        ("docker-daemon:app", "neither the name"),
        ("containers-storage:app", "neither the name"),
        ("./app", "neither the name"),
        ("oci:", "neither the name"),
    ],
)
def test_reference_of_other_kind_is_refused_with_the_supported_kinds(
    written: str, why: str
) -> None:
    with pytest.raises(Refused, match=why) as refused:
        parse(written, Path("/"))
    assert "docker-archive:FILE" in str(refused.value)


def test_reference_to_disk_is_refused_because_it_is_not_copied() -> None:
    with pytest.raises(Refused, match="is a disk file: jobs use it in place"):
        parse("./disk.qcow2", Path("/"))
