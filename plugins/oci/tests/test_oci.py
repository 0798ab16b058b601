"""Containers in every format, and invalid containers."""

from __future__ import annotations

import dataclasses
import gzip
import io
import json
import os
import shutil
import stat
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import oci_images as made
import sparing
from vtorque_core.api import Refused
from vtorque_core.api.unprivileged_parser import parse_unprivileged
from vtorque_linux_guest.image import filetree
from vtorque_linux_guest.image.ext4_xattr import can_store
from vtorque_linux_guest.image.filetree import FileTree
from vtorque_linux_guest.image.root_disk import write_disk
from vtorque_linux_guest.image.tar_reader import Budget
from vtorque_oci import blobs, documents, layers, oci
from vtorque_oci.blobs import open_source
from vtorque_oci.build import BuildOptions, parse_options, prepare
from vtorque_oci.container import Container, settings

CAPABILITY = {"SCHILY.xattr.security.capability": "\1\0\0\2", "SCHILY.xattr.user.note": "kept"}
BASE = made.layer(
    ("etc", b"", "d"),
    ("etc/old", b"old", "f"),
    ("etc/dir", b"", "d"),
    ("etc/dir/a", b"a", "f"),
    ("etc/dir/b", b"b", "f"),
    ("usr/lib", b"", "d"),
    ("lib", "usr/lib", "l"),
    ("bin/su", b"su", "f", {"mode": 0o4755, "pax_headers": CAPABILITY}),
    ("dev/null", b"", "c"),
)
UPPER = made.layer(
    ("etc/.wh.old", b"", "f"),
    ("etc/dir/c", b"c", "f"),
    ("etc/dir/.wh..wh..opq", b"", "f"),
    ("lib/new", b"new", "f"),
    ("lib/again", "lib/new", "h"),
    ("etc/.wh..wh.plnk", b"", "f"),
    ("etc/.wh.never-there", b"", "f"),
)


def read(source: Path, work: Path, most: int = 1 << 20, tag: str = "") -> Container:
    work.mkdir(exist_ok=True)
    with open_source(str(source)) as descriptor, oci.files_of(descriptor) as files:
        return oci.read_image(files, work, most, "x86_64", tag)


def tree_of(container: Container) -> FileTree:
    tree, budget = FileTree(), Budget()
    for path, digest in container.layers:
        file = path.open("rb")
        layers.check_digest(file, digest)
        layers.apply(tree, file, 1 << 20, can_store, budget)
    return tree


def check_tree(tree: FileTree) -> None:
    found = {path for path, node in tree.walk() if not node.is_directory}
    assert found == {"etc/dir/c", "lib", "usr/lib/new", "usr/lib/again", "bin/su"}
    assert tree.find("usr/lib/new") is tree.find("usr/lib/again")


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize(
    "make",
    [
        lambda p: made.as_directory(made.layout_files([BASE, UPPER]), p),
        lambda p: made.as_directory(made.layout_files([BASE, UPPER], made.zstd), p),
        lambda p: made.as_directory(made.layout_files([BASE, UPPER], bytes), p),
        lambda p: made.as_tar(made.layout_files([BASE, UPPER]), p),
        lambda p: made.as_tar(made.saved_files([BASE, UPPER]), p),
        lambda p: made.as_directory(made.saved_files([BASE, UPPER]), p),
    ],
    ids=["layout", "zstd", "plain", "oci-archive", "docker-archive", "saved directory"],
)
def test_all_formats_give_the_same_files(make: Callable[[Path], Path], tmp_path: Path) -> None:
    check_tree(tree_of(read(make(tmp_path / "source"), tmp_path / "work")))


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_files_written_by_skopeo_are_read(tmp_path: Path) -> None:
    source = made.as_directory(made.layout_files([BASE, UPPER]), tmp_path / "layout")
    # Otherwise root's skopeo keeps a cache in /var/lib/containers (containers/image,
    # blobinfocache).
    environ = {**os.environ, "_CONTAINERS_ROOTLESS_UID": "1", "XDG_DATA_HOME": str(tmp_path)}
    for form in ("oci-archive", "docker-archive", "oci"):
        target = tmp_path / form
        argv = ["skopeo", "--insecure-policy", "copy", "-q", f"oci:{source}:latest"]
        argv.append(f"{form}:{target}:app:1")
        subprocess.run(argv, check=True, capture_output=True, env=environ)
        check_tree(tree_of(read(target, tmp_path / f"work-{form}")))


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_privilege_is_dropped_and_attributes_stay(tmp_path: Path) -> None:
    source = made.as_directory(made.layout_files([BASE]), tmp_path / "source")
    tree = tree_of(read(source, tmp_path / "work"))
    su = tree.find("bin/su")
    assert su is not None
    assert set(su.xattrs) == {"security.capability", "user.note"}
    assert layers.strip_privileges(tree) == 1
    assert (stat.S_IMODE(su.mode), su.xattrs) == (0o755, {"user.note": b"kept"})
    assert layers.strip_privileges(tree) == 0


def test_environment_and_entry_point_are_read(tmp_path: Path) -> None:
    env = ["PATH=/app", "A=1=2", "HOME=/root", "PBS_JOBID=7", "EMPTY="]
    inner = {"Env": env, "Entrypoint": ["/app/run", "-v"], "Cmd": ["x"]}
    container = read(
        made.as_directory(made.layout_files([BASE], **inner), tmp_path / "s"), tmp_path / "work"
    )
    assert container.environment == {"PATH": "/app", "A": "1=2", "EMPTY": ""}
    assert (container.entrypoint, container.command) == (("/app/run", "-v"), ("x",))
    assert container.title == "latest"
    text = settings(container, container.entrypoint)
    assert text == b"A=1=2\0EMPTY=\0!PATH=/app\0\0/app/run\0-v\0"


def test_one_of_several_images_is_selected_by_tag(tmp_path: Path) -> None:
    files = made.layout_files([BASE])
    index = json.loads(files["index.json"])
    (one,) = index["manifests"]
    other = {**one, "annotations": {"org.opencontainers.image.ref.name": "other"}}
    index["manifests"] = [one, other]
    files["index.json"] = json.dumps(index).encode()
    source = made.as_directory(files, tmp_path / "s")
    with pytest.raises(Refused, match=r"contains 2 images \(latest, other\).*-o tag=NAME"):
        read(source, tmp_path / "w1")
    assert read(source, tmp_path / "w2", tag="other").title == "other"
    index["manifests"] = [{**one, "platform": {"architecture": "arm64"}}, other]
    other["platform"] = {"architecture": "amd64"}
    (source / "index.json").write_text(json.dumps(index))
    assert read(source, tmp_path / "w3").title == "other"
    index["manifests"].append({**one, "platform": {"architecture": "amd64", "os": "windows"}})
    (source / "index.json").write_text(json.dumps(index))
    assert read(source, tmp_path / "w5").title == "other"
    with pytest.raises(Refused, match="contains 0 images"):
        read(source, tmp_path / "w4", tag="missing")


def test_documents_are_parsed_without_privileges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def caller(_: bytes) -> None:
        raise ValueError(f"{os.getpid()} {os.geteuid()}")

    def parsed(document: int, _: str) -> None:
        try:
            json.loads(os.pread(document, 1 << 20, 0))
        except ValueError as error:
            raise Refused(str(error)) from None

    monkeypatch.setattr(json, "loads", caller)
    monkeypatch.setattr(documents, "_parse", parsed)
    with pytest.raises(Refused) as refused:
        read(made.as_directory(GOOD, tmp_path / "source"), tmp_path / "work")
    process, user = map(int, str(refused.value).split())
    assert process != os.getpid()
    assert user == (65534 if os.geteuid() == 0 else os.geteuid())


def test_list_of_a_tar_file_is_read_without_privileges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def caller(*_: object) -> None:
        raise Refused(f"{os.getpid()} {os.geteuid()}")

    monkeypatch.setattr(oci, "members", caller)
    with pytest.raises(Refused) as refused:
        read(made.as_tar(GOOD, tmp_path / "source"), tmp_path / "work")
    process, user = map(int, str(refused.value).split())
    assert process != os.getpid()
    assert user == (65534 if os.geteuid() == 0 else os.geteuid())


@pytest.mark.parametrize(
    "answer",
    [
        b"", b"0 1", b"0 1 file", b"x 1 file\0index.json\0", b"-1 9 file\0index.json\0",
        b"0 -9 file\0index.json\0", b"9 999999999 file\0index.json\0",
        b"0 1 file\0index.json\0more\0", b"0 1 2 file\0index.json",
    ],
)  # fmt: skip
def test_forged_list_of_a_tar_file_is_refused(
    answer: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blobs, "parse_unprivileged", lambda *_, **__: iter([answer]))
    with pytest.raises(Refused, match="invalid answer"):
        read(made.as_tar(GOOD, tmp_path / "source"), tmp_path / "work")


@pytest.mark.parametrize(
    ("parser", "answer"),
    [
        ("parse_index", []),
        ("parse_index", [b"sha256:../../etc", b"", b"", b""]),
        ("parse_index", [b"\xff"] * 4),
        ("parse_manifest", []),
        ("parse_manifest", [b"manifest", b"sha256:" + b"0" * 64]),
        ("parse_configuration", [b"L7"]),
        ("parse_configuration", []),
        ("parse_configuration", [b"Lsha256:" + b"0" * 64, b"ENAME"]),
    ],
)
def test_answers_of_a_parser_that_the_image_controls_are_refused(
    parser: str, answer: list[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blobs, "parse_unprivileged", lambda parse, *args, **more: (
        iter(answer) if parse.__name__ == parser else parse_unprivileged(parse, *args, **more)
    ))  # fmt: skip
    with pytest.raises(Refused, match=r"invalid answer|is not a supported digest"):
        read(made.as_directory(GOOD, tmp_path / "source"), tmp_path / "work")


def changed(files: dict[str, bytes], name: str, **changes: Any) -> dict[str, bytes]:
    """Return the layout with its manifest or configuration changed, and matching digests."""
    out = dict(files)
    index = json.loads(out["index.json"])
    path = "blobs/sha256/" + index["manifests"][0]["digest"][7:]
    manifest = json.loads(out.pop(path))
    if name == "config":
        where = "blobs/sha256/" + manifest["config"]["digest"][7:]
        data = json.dumps({**json.loads(out.pop(where)), **changes}).encode()
        out["blobs/sha256/" + made.digest(data)[7:]] = data
        manifest["config"] |= {"digest": made.digest(data), "size": len(data)}
    else:
        manifest.update(changes)
    data = json.dumps(manifest).encode()
    out["blobs/sha256/" + made.digest(data)[7:]] = data
    index["manifests"][0] |= {"digest": made.digest(data), "size": len(data)}
    out["index.json"] = json.dumps(index).encode()
    return out


GOOD = made.layout_files([BASE])
LAYER = next(name for name, data in GOOD.items() if data.startswith(b"\x1f\x8b"))
DESCRIBED = {"digest": "sha256:" + LAYER[-64:]}
BOMB = made.layout_files([made.layer(("zeros", bytes(2 << 20), "f"))])


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"oci-layout": b"{}"}, "has neither index.json"),
        ({**GOOD, "index.json": b"{"}, "index.json is not JSON"),
        ({**GOOD, "index.json": b"[" * 100_000}, "index.json is not JSON"),
        ({**GOOD, "index.json": b"[]"}, "not a JSON object"),
        ({**GOOD, "index.json": b'{"manifests": 3}'}, "lists no manifests"),
        ({**GOOD, "index.json": b" " * (5 << 20)}, "bytes, and the limit is 4194304"),
        ({**GOOD, "index.json": b'{"manifests": [{"digest": "sha256:../../x"}]}'}, "supported"),
        ({**GOOD, "index.json": b'{"manifests": [{"digest": "md5:00"}]}'}, "is not a supported"),
        ({k: v for k, v in GOOD.items() if k != LAYER}, "lacks the layer"),
        ({**GOOD, LAYER: GOOD[LAYER][:-9]}, "a blob has .* bytes, but its descriptor says"),
        ({**GOOD, LAYER: GOOD[LAYER][:-1] + b"\1"}, "is damaged"),
        (changed(GOOD, "manifest", layers=[{**DESCRIBED, "size": 1 << 50}]), "says 1125"),
        (changed(GOOD, "manifest", layers=[{**DESCRIBED, "size": "x"}]), "descriptor says x"),
        (changed(GOOD, "manifest", config={**DESCRIBED, "size": 3}), "descriptor says 3"),
        (changed(GOOD, "manifest", config=[]), "is not a JSON object"),
        (changed(GOOD, "config", config={"Env": ["A=\ud800"]}), "contains a string that cannot"),
        (changed(GOOD, "config", config={"Entrypoint": ["\ud800"]}), "contains a string that"),
        (changed(GOOD, "config", config={"Cmd": ["x" * (1 << 17)]}), "contains a string that"),
        (changed(GOOD, "config", rootfs={"diff_ids": [7]}), "is not a supported digest: it must"),
        (changed(GOOD, "config", config=[1]), '"config" of the image configuration is not'),
        ({**GOOD, "index.json": b'{"manifests": [{"annotations": "x", "platform": 7}, {}]}'},
         "contains 2 images"),
        (changed(GOOD, "manifest", layers=[]), "has no layers"),
        (changed(GOOD, "manifest", layers=[{}] * 200), "more than 127"),
        (changed(GOOD, "manifest", layers=[3]), "not a JSON object"),
        (changed(GOOD, "config", architecture="arm64"), "'arm64', but guests have amd64"),
        (changed(GOOD, "config", os="windows"), "os 'windows'"),
        (changed(GOOD, "config", rootfs={}), "does not list as many layers as the manifest"),
        (changed(GOOD, "config", config={"Env": ["A B"]}), "not NAME=VALUE"),
        (changed(GOOD, "config", config={"Env": ["A=\0"]}), "contains a string that cannot be"),
        (changed(GOOD, "config", config={"Entrypoint": "run"}), "is not a list of strings"),
        (made.layout_files([BASE], lambda data: b"BZh" + data), "a layer is not compressed with"),
        (made.layout_files([BASE], lambda d: gzip.compress(d)[:-20]), "gzip failed: .*"),
        (BOMB, "unpacks to more than 1 MiB"),
        (made.layout_files([made.layer(("z", bytes(2 << 20), "f"))], made.zstd), "than 1 MiB"),
        ({"manifest.json": b"{}"}, "not a list of images"),
        ({"manifest.json": b"[]"}, "contains 0 matching images: choose one with -o tag=NAME"),
        ({"manifest.json": b'[{"Config": "c", "Layers": [7], "RepoTags": 7}]'}, "the layer 7"),
        ({"manifest.json": b'[{"Config": "../c", "Layers": []}]'}, "manifest.json lacks layers"),
        ({"manifest.json": b'[{"Config": "c", "Layers": ["../../x"]}]'}, "not a path|lacks"),
    ],
)  # fmt: skip
@pytest.mark.parametrize(
    "form", sparing.each(2, [made.as_directory, made.as_tar]), ids=["directory", "tar"]
)
def test_broken_images_are_refused(
    files: dict[str, bytes], message: str, form: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(Refused, match=message):
        read(form(files, tmp_path / "source"), tmp_path / "work")


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (("/etc/passwd", b"x", "f"), "absolute path"),
        (("../../etc/passwd", b"x", "f"), "contains '..'"),
        (("disk", b"", "c"), "is a device"),
        (("h", "../../etc/shadow", "h"), "hard link"),
        (("etc/.wh...", b"", "f"), "does not name a file"),
        (("etc/.wh.", b"", "f"), "does not name a file"),
        (("etc/old/x", b"", "f"), "is not a directory"),
        (("..", b"", "d"), "contains '..'"),
        (("", "/etc", "l"), "root of the image must be a directory"),
        (("../.wh.etc", b"", "f"), "contains '..'"),
        (("etc/../../.wh..wh..opq", b"", "f"), "contains '..'"),
        (("h", "/etc/shadow", "h"), "hard link with an absolute path"),
        (("h", "etc", "h"), "which is not a file"),
        (("f", b"", "f", {"pax_headers": {"mtime": "nan"}}), "is not a number"),
        (("f", b"", "f", {"pax_headers": {"GNU.sparse.major": "1"}}), "sparse member"),
    ],
)
def test_hostile_layers_are_refused(entry: made.Entry, message: str, tmp_path: Path) -> None:
    files = made.layout_files([BASE, made.layer(entry)])
    container = read(made.as_directory(files, tmp_path / "s"), tmp_path / "work")
    with pytest.raises(Refused, match=message):
        tree_of(container)


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize("budget", [Budget(entries=25), Budget(headers=50_000)])
def test_layers_of_an_image_share_one_budget(budget: Budget, tmp_path: Path) -> None:
    attributes = {f"SCHILY.xattr.user.{n}": "x" for n in range(10)}
    one = made.layer(*((f"f{n}", b"", "f", {"pax_headers": attributes}) for n in range(10)))
    layers.apply(FileTree(), io.BytesIO(one), 0, can_store, dataclasses.replace(budget))
    tree = FileTree()
    layers.apply(tree, io.BytesIO(one), 0, can_store, budget)
    with pytest.raises(Refused, match=r"files in all its layers|long names and attributes"):
        for _ in range(2):
            layers.apply(tree, io.BytesIO(one), 0, can_store, budget)


@pytest.mark.parametrize("kind", [b"g", b"x", b"L"])
def test_headers_without_content_count_too(kind: bytes) -> None:
    info = tarfile.TarInfo("name")
    info.type = kind
    data = info.tobuf(tarfile.USTAR_FORMAT) * 200 + made.layer(("f", b"", "f"))
    layers.apply(FileTree(), io.BytesIO(data), 0, can_store, Budget())
    with pytest.raises(Refused, match="long names and attributes"):
        layers.apply(FileTree(), io.BytesIO(data), 0, can_store, Budget(headers=50_000))


def test_chains_of_links_are_followed_in_a_bounded_number_of_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(filetree, "MAX_STEPS", 200_000)
    chain = [(f"l{n}", "./" * 2000 + f"l{n + 1}", "l") for n in range(39)]
    wide = [(f"w{n}", "d/../" * 800 + f"w{n + 1}", "l") for n in range(39)]
    for links, last in ((chain, "l39"), (wide, "w39")):
        through = [(f"{links[0][0]}/f{n}", b"", "f") for n in range(2000)]
        data = made.layer(("d", b"", "d"), (last, b"", "d"), *links, *through)
        tree = FileTree()
        with pytest.raises(Refused, match="takes more than 200000 steps"):
            layers.apply(tree, io.BytesIO(data), 0, can_store, Budget())


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_links_of_a_layer_do_not_lead_outside(tmp_path: Path) -> None:
    """Files that an unpacker could write to this machine's /etc are in the image's own."""
    evil = made.layer(("evil", "/etc", "l"), ("up", "../../../../etc", "l"))
    through = made.layer(("evil/mark", b"1", "f"), ("up/mark2", b"2", "f"))
    files = made.layout_files([BASE, evil, through])
    tree = tree_of(read(made.as_directory(files, tmp_path / "s"), tmp_path / "work"))
    assert {"etc/mark", "etc/mark2"} <= {path for path, _ in tree.walk()}
    assert not Path("/etc/mark").exists()


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_whiteouts_through_links_stay_in_the_image(tmp_path: Path) -> None:
    """A whiteout below a link hides the link's target in the image; in the root, its files."""
    (tmp_path / "kept").write_text("of the machine")
    evil = made.layer(("evil", str(tmp_path), "l"), ("up", "../" * 30, "l"), ("x", b"x", "f"))
    names = ("evil/.wh.kept", "evil/.wh..wh..opq", "up/.wh.x", f"up{tmp_path}/.wh.kept")
    files = made.layout_files([BASE, evil, made.layer(*((n, b"", "f") for n in names))])
    tree = tree_of(read(made.as_directory(files, tmp_path / "s"), tmp_path / "work"))
    assert (tmp_path / "kept").read_text() == "of the machine"
    assert tree.find("x") is None
    files = made.layout_files([BASE, made.layer((".wh..wh..opq", b"", "f"), ("y", b"y", "f"))])
    tree = tree_of(read(made.as_directory(files, tmp_path / "s2"), tmp_path / "work2"))
    assert [path for path, _ in tree.walk()] == ["", "y"]


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_code_run_by_guest_root_is_writable_by_root_only(tmp_path: Path) -> None:
    """All can write the container's directories, links lead through /tmp, a module is its own."""
    loose = {"mode": 0o777, "uid": 1000}
    evil = made.layer(
        (".", b"", "d", loose),
        ("usr", b"", "d", loose),
        ("usr/lib", "/tmp/lib", "l"),
        ("tmp/lib", b"", "d", loose),
        ("tmp", b"", "d", {"mode": 0o1777}),
        ("tmp/s", b"", "d", loose),
        ("sbin", "tmp/s", "l"),
        ("sbin/request-key", b"#!/bin/sh", "f"),
        ("lib/modules/6/evil.ko", b"", "f"),
        ("etc", b"", "d", loose),
        ("etc/resolv.conf", "../run/systemd/resolve/stub-resolv.conf", "l"),
        ("home/user", b"", "d", loose),
        ("lost+found", b"x", "f"),
        ("lost", "lost+found", "h"),
    )
    files = made.layout_files([evil])
    container = read(made.as_directory(files, tmp_path / "s"), tmp_path / "work")
    tree = tree_of(container)
    prepare(tree, container, BuildOptions(source="s"), ())
    for path in ("", "usr", "tmp/lib", "tmp/lib/vtorque", "tmp/s", "etc", "lib", "lib/modules"):
        node = tree.find(path, follow=False)
        assert node is not None, path
        assert (node.uid, node.mode & 0o022, node.is_directory) == (0, 0, True), path
    for path in ("tmp/s/request-key", "lib/modules/6"):
        assert tree.find(path) is None
    resolver = tree.find("etc/resolv.conf", follow=False)
    assert resolver is not None and resolver.is_file  # written in the guest, which has no systemd
    user = tree.find("home/user")
    assert user is not None
    assert (user.uid, stat.S_IMODE(user.mode)) == (1000, 0o777)
    (tmp_path / "disk").mkdir()
    write_disk(tree, tmp_path / "disk", tmp_path / "root.qcow2", 64)


def test_settings_above_the_agent_limit_are_refused() -> None:
    environment = {f"N{number}": "x" * 100_000 for number in range(11)}
    with pytest.raises(Refused, match="bytes, and the agent's limit is 1048576"):
        settings(Container((), environment), ())


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_layer_missing_in_the_configuration_is_refused(tmp_path: Path) -> None:
    rootfs = {"type": "layers", "diff_ids": [made.digest(b"other")]}
    files = changed(GOOD, "config", rootfs=rootfs)
    container = read(made.as_directory(files, tmp_path / "s"), tmp_path / "work")
    with pytest.raises(Refused, match="a layer has sha256"):
        tree_of(container)


def test_sources_that_are_not_regular_files_are_refused(tmp_path: Path) -> None:
    source = made.as_directory(GOOD, tmp_path / "source")
    (tmp_path / "link").symlink_to(source)
    os.mkfifo(tmp_path / "fifo")
    for path, message in (
        (tmp_path / "link", "symbolic link"),
        (tmp_path / "missing", "No such file"),
        (tmp_path / "fifo", "neither a file nor a directory"),
        (Path("/dev/zero"), "neither a file nor a directory"),
    ):
        with pytest.raises(Refused, match=message):
            read(path, tmp_path / "work")
    (source / "index.json").rename(tmp_path / "index")
    (source / "index.json").symlink_to(tmp_path / "index")
    with pytest.raises(Refused, match="has neither index"):
        read(source, tmp_path / "work")
    packed = tmp_path / "packed.tar.gz"
    packed.write_bytes(gzip.compress(made.as_tar(GOOD, tmp_path / "t").read_bytes()))
    with pytest.raises(Refused, match="unpack it first"):
        read(packed, tmp_path / "work")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "source is missing: name a directory, a tar"),
        ({"source": "x", "run": "yes"}, "has no option run"),
        ({"source": "x", "entrypoint": "yes"}, "entrypoint='yes': must be ignore or run"),
        ({"source": "x", "setuid": "1"}, "setuid='1'"),
        ({"source": "x", "size": "1"}, "size"),
        ({"source": "x", "size": "9T"}, "size=9T: must be between 64M and 1T"),
        ({"source": "x", "debs": "relative"}, "debs=relative"),
    ],
)
def test_bad_options_are_refused(arguments: dict[str, str], message: str) -> None:
    with pytest.raises(Refused, match=message):
        parse_options(arguments)


@pytest.fixture(autouse=True)
def _tools() -> None:
    for tool in ("zstd", "skopeo", "mksquashfs", "sqfs2tar"):
        assert shutil.which(tool), f"{tool} is missing: scripts/node packages"
