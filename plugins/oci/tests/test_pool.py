"""``vmgr images build`` with broken input: refused, without changes of pool and staging."""

from __future__ import annotations

import functools
import gzip
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import oci_images as made
import processes
import sparing
from vtorque_core.api import HostFault, Refused, UsageError
from vtorque_core.api.image_builder import BuiltImage
from vtorque_core.base import trust
from vtorque_core.live import images
from vtorque_core.live.images import store
from vtorque_images import change as pool_of
from vtorque_oci import build, oci
from vtorque_oci.blobs import open_source, run_as_nobody
from vtorque_testing import vmgr

Source = Callable[[Path], Path]


def one_layer(*entries: made.Entry) -> Source:
    return lambda path: made.as_directory(made.layout_files([made.layer(*entries)]), path)


def bomb(path: Path) -> Path:
    return one_layer(("zeros", bytes(65 << 20), "f"))(path)


def patched(old: bytes, new: bytes) -> Source:
    """Return an image whose manifest, and so its digest, stays while other files change."""

    def write(path: Path) -> Path:
        files = made.layout_files([made.layer(("f", b"x", "f"))])
        return made.as_directory({k: v.replace(old, new) for k, v in files.items()}, path)

    return write


def many_layers(path: Path) -> Path:
    layers = [made.layer((f"f{number}", b"x", "f")) for number in range(128)]
    return made.as_directory(made.layout_files(layers), path)


def sif(**changes: Any) -> Source:
    def write(path: Path) -> Path:
        root = path.with_suffix(".root")
        root.mkdir(exist_ok=True)
        (root / "data").write_bytes(bytes(100_000))
        return made.as_sif(root, path, **changes)

    return write


def one_large(root: Path) -> Path:
    root.mkdir(exist_ok=True)
    (root / "zeros").write_bytes(bytes(65 << 20))
    return root


def recipe(text: str) -> Source:
    def write(path: Path) -> Path:
        path.write_text(text)
        return path

    return write


BROKEN: dict[str, tuple[str, Source, str]] = {
    "absolute path": ("oci", one_layer(("/etc/passwd", b"x", "f")), "absolute path"),
    "dot dot": ("oci", one_layer(("a/../../x", b"x", "f")), "contains '..'"),
    "device": ("oci", one_layer(("sda", b"", "c")), "is a device"),
    "hard link out": ("oci", one_layer(("h", "../../etc/shadow", "h")), "hard link"),
    "bomb": (
        "oci",
        bomb,
        "unpacks to more than 64 MiB. The limit is the root disk's size (-o size=) and a third",
    ),
    "whiteout of dot dot": ("oci", one_layer(("etc/.wh...", b"", "f")), "does not name a file"),
    "whiteout outside": ("oci", one_layer(("../.wh.etc", b"", "f")), "contains '..'"),
    "link to itself": (
        "oci",
        one_layer(("a", "a/b", "l"), ("a/c", b"x", "f")),
        "too many symbolic links",
    ),
    "hard link to a directory": (
        "oci",
        one_layer(("d", b"", "d"), ("h", "d", "h")),
        "which is not a file",
    ),
    "many layers": ("oci", many_layers, "more than 127"),
    "digest": ("oci", patched(b"amd64", b"arm64"), "is damaged"),
    "size": ("oci", patched(b'"size": ', b'"size": 1'), "its descriptor says"),
    "sif bomb": (
        "oci",
        lambda p: made.as_sif(one_large(p.with_suffix(".root")), p),
        "unpacks to more than 64 MiB. The limit is the root disk's size (-o size=) and a third",
    ),
    "sif truncated": ("oci", sif(size=1 << 40), "the SIF is truncated: its root file"),
    "sif damaged": ("oci", sif(offset=0), "sqfs2tar failed"),
    "no image": ("oci", lambda p: made.as_directory({"x": b""}, p), "has neither index"),
    "not there": ("oci", lambda p: p / "missing", "No such file"),
    "compressed": ("oci", recipe("\x1f\x8b"), "is not a valid tar file"),
    "text": ("oci", recipe("just a text\n" * 1000), "is not a valid tar file"),
    "saved without layers": (
        "oci",
        lambda p: made.as_tar({**made.saved_files([]), "manifest.json": b"[{}]"}, p),
        "manifest.json lacks layers or a",
    ),
    "recipe dot dot": (
        "linux",
        recipe('family="debian"\nsuite="bookworm"\n[[files]]\ntarget="/x"\nsource="../x"\n'),
        "line 5: files.source '../x'",
    ),
    "recipe newline": ("linux", recipe('family="debian"\nsuite="a\\nb"\n'), "line 2: suite"),
    "recipe file": (
        "linux",
        recipe('family="debian"\nsuite="bookworm"\n[[files]]\ntarget="/x"\nsource="missing"\n'),
        "'missing' of the recipe",
    ),
}


@pytest.fixture
def pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "pool"
    path.mkdir(mode=0o755)
    (tmp_path / "site.toml").write_text(
        f'[images]\npool = "{path}"\nkeep = 0\n'
        f'[paths]\nstate = "{tmp_path}/state"\nrun = "{tmp_path}/run"\n'
    )
    monkeypatch.setattr(images, "effective_root", lambda: True)
    as_user = functools.partial(trust.require_root_owned, uid=os.geteuid())
    monkeypatch.setattr(trust, "require_root_owned", as_user)
    with store.staging(path) as staging:
        (staging / "k").write_text("kernel")
        built = BuiltImage("linux", "micro", "x86_64", 64, kernel="k")
        pool_of.commit(path, "there", staging, built, "test")
    return path


def state(pool: Path) -> dict[str, Any]:
    """Return the content of the pool, without times."""
    return {
        str(path.relative_to(pool)): path.read_bytes() if path.is_file() else None
        for path in sorted(pool.rglob("*"))
    }


@pytest.mark.parametrize("case", sparing.each(3, BROKEN))
def test_broken_input_does_not_change_the_pool(case: str, pool: Path, tmp_path: Path) -> None:
    builder, make, message = BROKEN[case]
    source = make(tmp_path / "source")
    key = "source" if builder == "oci" else "recipe"
    size = ["-o", "size=64M"] if builder == "oci" else []
    before = state(pool)
    for name in ("new", "there"):
        argv = ["build", name, builder, "-o", f"{key}={source}", *size]
        done = vmgr.run(tmp_path / "site.toml", "images", *argv)
        assert isinstance(done.exception, Refused | HostFault), done.exception
        assert message in str(done.exception)
        assert state(pool) == before


def test_name_with_a_newline_is_refused_first(pool: Path, tmp_path: Path) -> None:
    before = state(pool)
    argv = ["build", "a\nb", "oci", "-o", "source=/x"]
    done = vmgr.run(tmp_path / "site.toml", "images", *argv)
    assert isinstance(done.exception, Refused)
    assert state(pool) == before


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--oci", "/nowhere/app.tar"], "source /nowhere/app.tar: '/nowhere/app.tar': No such"),
        (["there", "--oci", "/nowhere"], "source /nowhere: '/nowhere': No such"),
        (["--oci", "/nowhere/a b.tar"], "a b"),
        (["there", "oci", "--oci", "/x"], "--oci sets builder and source"),
        (["there", "--oci", "/x", "-o", "source=/y"], "--oci sets builder and source"),
        (["there"], "NAME BUILDER, or --oci DIR|FILE, are missing"),
        ([], "NAME BUILDER, or --oci DIR|FILE, are missing"),
    ],
)
def test_invalid_short_form_arguments_are_refused(
    words: list[str], message: str, pool: Path
) -> None:
    site = pool.parent / "site.toml"
    before = state(pool)
    done = vmgr.run(site, "images", "build", *words)
    assert isinstance(done.exception, Refused | UsageError), done.exception
    assert message in str(done.exception)
    assert state(pool) == before


def test_layers_leave_room_on_the_disk(
    pool: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most a third of the free space is used for unpacked layers."""
    monkeypatch.setattr(build, "room", lambda work: 1 << 20 if work.is_dir() else 0)
    source = one_layer(("zeros", bytes(3 << 20), "f"))(tmp_path / "source")
    before = state(pool)
    argv = ["build", "new", "--oci", str(source)]
    done = vmgr.run(pool.parent / "site.toml", "images", *argv)
    assert (
        "unpacks to more than 1 MiB. The limit is the root disk's size (-o size=) and a third of"
        in str(done.exception)
    )
    assert state(pool) == before
    monkeypatch.undo()
    assert 0 < build.room(tmp_path) < shutil.disk_usage(tmp_path).free // 2


def test_gzip_bombs_in_members_are_counted_together(tmp_path: Path) -> None:
    from vtorque_oci.blobs import unpack_layer

    packed = tmp_path / "packed"
    packed.write_bytes(gzip.compress(bytes(600)) * 2)
    assert unpack_layer(packed, tmp_path / "out", 1200).stat().st_size == 1200
    packed.write_bytes(gzip.compress(bytes(600)) * 2)
    with pytest.raises(
        Refused,
        match=r"unpacks to more than 0 MiB. The limit is the root disk's size \(-o size=\) and a",
    ):
        unpack_layer(packed, tmp_path / "out2", 1199)


@pytest.mark.parametrize("pack", [gzip.compress, made.zstd])
def test_all_layers_must_be_decompressed_in_time(
    pack: Callable[[bytes], bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oci, "TIMEOUT", 0)
    source = made.as_directory(made.layout_files([made.layer()], pack), tmp_path / "source")
    (tmp_path / "work").mkdir()
    with (
        open_source(str(source)) as descriptor,
        oci.files_of(descriptor) as files,
        pytest.raises(Refused, match="layers were not unpacked within"),
    ):
        oci.read_image(files, tmp_path / "work", 1 << 20, "x86_64", "")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a tool a pid namespace")
def test_child_of_a_tool_is_killed_before_it_writes_to_a_layer(tmp_path: Path) -> None:
    """A tool that a hostile container controls leaves a process with the file open."""
    marked = "86398.25"  # seconds: how the test finds the process
    script = f"id -u; setsid sh -c 'sleep {marked}; echo changed' 2>/dev/null & echo over"
    (tmp_path / "in").write_bytes(b"")
    with (tmp_path / "in").open("rb") as file:
        run_as_nobody(("sh", "-c", script), file, tmp_path / "out", 4096, "dash")
    assert sorted((tmp_path / "out").read_text().split()) == ["65534", "over"]
    assert processes.with_word(marked) == []
