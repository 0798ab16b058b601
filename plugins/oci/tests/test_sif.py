"""SIF files: header and descriptors as Apptainer writes them, made with mksquashfs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import oci_images as made
from vtorque_core.api import Refused
from vtorque_linux_guest.image.ext4_xattr import can_store
from vtorque_linux_guest.image.filetree import read_tar
from vtorque_oci import blobs, sif
from vtorque_oci.blobs import open_source


@pytest.fixture
def root(tmp_path: Path) -> Path:
    path = tmp_path / "root"
    (path / ".singularity.d/env").mkdir(parents=True)
    (path / ".singularity.d/runscript").write_text('#!/bin/sh\nexec "$@"\n')
    (path / ".singularity.d/env/10-x.sh").write_text("export X=1\n")
    (path / "data").write_bytes(bytes(100_000))
    (path / "link").symlink_to("/etc/shadow")
    return path


def read(path: Path, work: Path, most: int = 1 << 20) -> Any:
    work.mkdir()
    with open_source(str(path)) as descriptor:
        return sif.read_sif(descriptor, work, most, "x86_64", path.name)


def test_sif_is_one_layer_with_a_runscript(root: Path, tmp_path: Path) -> None:
    container = read(made.as_sif(root, tmp_path / "app.sif"), tmp_path / "work")
    assert container.entrypoint == ("/.singularity.d/runscript",)
    ((layer, digest),) = container.layers
    assert digest is None
    with layer.open("rb") as file:
        tree = read_tar(file, 1 << 20, can_store)
        found = {path: node for path, node in tree.walk() if not node.is_directory}
        names = {"data", "link", ".singularity.d/runscript", ".singularity.d/env/10-x.sh"}
        assert set(found) == names
        assert found["link"].read() == b"/etc/shadow"
        assert {node.uid for node in found.values()} == {0}
        assert sif.add_environment(tree) == ("/usr/lib/vtorque/sif-environment",)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"magic": b"SIF_MAGIX\0"}, "is not a SIF"),
        ({"arch": b"04\0"}, "has the architecture"),
        ({"total": 0}, "header is invalid"),
        ({"total": -1}, "header is invalid"),
        ({"total": 1 << 40}, "header is invalid"),
        ({"table": 1 << 50}, "header is invalid"),
        ({"table": -8}, "header is invalid"),
        ({"kind": 0x4003}, "the SIF has no readable root file"),
        ({"purpose": 4}, "the SIF has no readable root file"),
        ({"system": 2}, "the SIF's root file system has type 2, but only squashfs is supported"),
        ({"offset": -1}, "the SIF is truncated: its root file"),
        ({"size": 1 << 40}, "the SIF is truncated: its root file"),
        ({"size": 0}, "the SIF is truncated: its root file"),
        ({"size": 300}, "sqfs2tar failed"),
        ({"offset": 0}, "sqfs2tar failed"),
    ],
)
def test_broken_files_are_refused(
    root: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(Refused, match=message):
        read(made.as_sif(root, tmp_path / "app.sif", **changes), tmp_path / "work")


def test_bomb_is_refused(root: Path, tmp_path: Path) -> None:
    (root / "zeros").write_bytes(bytes(30 << 20))
    with pytest.raises(
        Refused,
        match=r"unpacks to more than 1 MiB. The limit is the root disk's size \(-o size=\) and a",
    ):
        read(made.as_sif(root, tmp_path / "app.sif"), tmp_path / "work")


def test_header_is_read_without_privileges(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def caller(_: bytes) -> bool:
        raise Refused(f"{os.getpid()} {os.geteuid()}")

    monkeypatch.setattr(sif, "is_sif", caller)
    with pytest.raises(Refused) as refused:
        read(made.as_sif(root, tmp_path / "app.sif"), tmp_path / "work")
    process, user = map(int, str(refused.value).split())
    assert process != os.getpid()
    assert user == (65534 if os.geteuid() == 0 else os.geteuid())


@pytest.mark.parametrize("answer", [[], [b"0"], [b"x", b"1"], [b"-1", b"2"], [b"0", b"9" * 15]])
def test_forged_header_is_refused(
    answer: list[bytes], root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blobs, "parse_unprivileged", lambda *_, **__: iter(answer))
    with pytest.raises(Refused, match="invalid answer"):
        read(made.as_sif(root, tmp_path / "app.sif"), tmp_path / "work")
