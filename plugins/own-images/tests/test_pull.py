"""Pull images from a registry and from files, and convert them into the user's cache."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from oci_images import as_directory, as_sif, as_tar, digest, layer, layout_files, saved_files
from patience import eventually
from personal_site import PersonalSite
from registry import Registry
from vtorque_core.api import HostFault, Refused
from vtorque_core.api.children import wait_readable
from vtorque_own_images import convert, pull, skopeo
from vtorque_own_images.cache import Cache, cache_of
from vtorque_own_images.pull import resolve
from vtorque_own_images.reference import parse

GZIP = b"\x1f\x8b"


def listing(file: str) -> dict[str, str]:
    """Return path to mode and owner of the files in a squashfs."""
    argv = ["unsquashfs", "-lln", file]
    lines = subprocess.run(argv, check=True, capture_output=True, text=True).stdout.splitlines()
    words = [line.split(maxsplit=5) for line in lines if "squashfs-root/" in line]
    return {w[5].partition("squashfs-root/")[2]: f"{w[0]} {w[1]}" for w in words}


def content(file: str, path: str) -> bytes:
    return subprocess.run(
        ["unsquashfs", "-cat", file, path], check=True, capture_output=True
    ).stdout


def files(images: Cache) -> list[Path]:
    """Return all files in the cache."""
    return list(images.root.iterdir()) if images.root.exists() else []


def leftovers(images: Cache) -> list[str]:
    """Return the files in the cache besides finished images."""
    names = [path.name for path in images.root.iterdir()]
    return [name for name in names if not name.endswith((".squashfs", ".json"))]


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Count the calls that copy and that convert."""
    calls: list[str] = []
    for module, name in ((skopeo, "copy"), (convert, "convert")):
        real = getattr(module, name)

        def call(*args: Any, name: str = name, real: Any = real) -> None:
            calls.append(name)
            real(*args)

        monkeypatch.setattr(module, name, call)
    return calls


def test_pull_from_registry_merges_layers(
    registry: Registry, layout: Path, images: Cache, site: Any
) -> None:
    file = resolve(registry.push(layout, "app:1"), site, True)
    assert Path(file).parent == images.root
    found = listing(file)
    assert found["bin/sh"] == "-rwxr-xr-x 0/0"
    assert "gone" not in found
    assert content(file, "etc/os-release") == b"ID=strange\n"
    assert b"GREETING=hello\0" in content(file, "usr/lib/vtorque/container")
    assert content(file, "bin/again") == b"shell"
    assert Path(file).stat().st_size % 512 == 0
    assert leftovers(images) == []


def test_pull_of_cached_digest_transfers_nothing(
    registry: Registry, layout: Path, images: Cache, site: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = registry.push(layout, "app:1")
    calls = counted(monkeypatch)
    first = resolve(value, site, True)
    assert calls == ["copy", "convert"]
    assert resolve(value, site, True) == first
    other = registry.push(layout, "same:2")
    assert resolve(other, site, True) == first
    assert calls == ["copy", "convert"]
    assert resolve(value, site, False) == resolve(other, site, False) == first


def test_pull_after_tag_moved_leaves_submitted_image(
    registry: Registry, layout: Path, images: Cache, site: Any, tmp_path: Path
) -> None:
    value = registry.push(layout, "app:1")
    submitted = resolve(value, site, True)
    other = as_directory(layout_files([layer(("new", b"new", "f"))]), tmp_path / "other")
    registry.push(other, "app:1")
    moved = resolve(value, site, True)
    assert moved != submitted
    assert resolve(value, site, False) == moved
    assert "bin/sh" in listing(submitted)


def test_no_pull_uses_cache_without_registry(
    registry: Registry, layout: Path, images: Cache, site: Any
) -> None:
    value = registry.push(layout, "app:1")
    with pytest.raises(Refused, match=r"not in your cache.*vmgr images pull"):
        resolve(value, site, False)
    file = resolve(value, site, True)
    registry.stop()
    assert resolve(value, site, False) == file
    with pytest.raises(HostFault, match="could not be copied"):
        resolve(value, site, True)


def test_no_pull_of_relative_path_means_the_same_directory(
    layout: Path, images: Cache, site: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(layout.parent)
    file = resolve("oci:./layout", site, True)
    assert resolve("oci:./layout", site, False) == file
    monkeypatch.chdir("/")
    with pytest.raises(Refused, match="not in your cache"):
        resolve("oci:./layout", site, False)
    assert resolve(f"oci:{layout}", site, False) == file


def test_pull_with_wrong_password_names_the_fix(
    registry: Registry, layout: Path, images: Cache, site: Any
) -> None:
    value = registry.push(layout, "app:1")
    registry.log_in("wrong")
    with pytest.raises(Refused, match=r"refuses your credentials.*skopeo login"):
        resolve(value, site, True)
    assert files(images) == []


def test_pull_of_missing_tag_is_refused(
    registry: Registry, layout: Path, images: Cache, site: Any
) -> None:
    registry.push(layout, "app:1")
    with pytest.raises(Refused, match="there is no such image"):
        resolve(f"docker://{registry.name}/app:2", site, True)


def test_local_image_never_takes_the_place_of_an_image_in_a_registry(
    layout: Path, images: Cache, site: Any
) -> None:
    """Code that shares the layout could replace it between the hash and the conversion."""
    name = f"oci:{layout}"
    file = Path(resolve(name, site, True))
    assert file.exists()
    assert images.entry(skopeo.digest_of(skopeo.manifest(parse(name, layout), 0))) is None


def test_pull_of_truncated_layer_leaves_nothing(
    registry: Registry, layout: Path, images: Cache, site: Any
) -> None:
    value = registry.push(layout, "app:1")
    (packed, *_) = (path for path in registry.blobs() if path.read_bytes()[:2] == GZIP)
    packed.write_bytes(packed.read_bytes()[:-7])
    with pytest.raises(Refused, match="damaged or truncated"):
        resolve(value, site, True)
    assert files(images) == []


def test_pull_of_layer_with_other_content_than_configured_leaves_nothing(
    images: Cache, site: Any, tmp_path: Path
) -> None:
    blobs = layout_files([layer(("a", b"x", "f"))])
    (config,) = (name for name, data in blobs.items() if b"diff_ids" in data)
    other = layout_files([layer(("a", b"y", "f"))])
    (expected,) = (data for data in other.values() if b"diff_ids" in data)
    text = blobs.pop(config)
    name = digest(expected)[7:]
    blobs[f"blobs/sha256/{name}"] = expected
    for path in [path for path, data in blobs.items() if config[13:].encode() in data]:
        manifest = blobs.pop(path).replace(config[13:].encode(), name.encode())
        changed = digest(manifest)[7:]
        index = blobs["index.json"].replace(path[13:].encode(), changed.encode())
        size = f'"size": {len(manifest)}'
        blobs |= {f"blobs/sha256/{changed}": manifest, "index.json": index}
    assert len(text) == len(expected) and size.encode() in blobs["index.json"]
    made = as_directory(blobs, tmp_path / "made")
    with pytest.raises(Refused, match="but the configuration requires"):
        resolve(f"oci:{made}", site, True)
    assert files(images) == []


def test_pull_continues_after_interruption(
    registry: Registry, layout: Path, images: Cache, site: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = registry.push(layout, "app:1")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(convert, "convert", interrupted)
        with pytest.raises(KeyboardInterrupt):
            resolve(value, site, True)
    assert len(leftovers(images)) == 1
    for blob in registry.blobs():  # only layers that were not copied would be read
        if blob.read_bytes()[:2] == GZIP:
            blob.unlink()
    resolve(value, site, True)
    assert leftovers(images) == []


@pytest.mark.parametrize("kind", ["oci", "oci:latest", "docker-archive", "sif"])
def test_local_image_is_pulled_and_converted(
    kind: str, layout: Path, images: Cache, site: Any, tmp_path: Path
) -> None:
    if kind == "sif":
        (tmp_path / "root/bin").mkdir(parents=True)
        (tmp_path / "root/bin/sh").write_bytes(b"shell")
        value = str(as_sif(tmp_path / "root", tmp_path / "app.sif"))
    elif kind == "docker-archive":
        saved = saved_files([layer(("bin/sh", b"shell", "f"))])
        value = f"{kind}:{as_tar(saved, tmp_path / 'app.tar')}"
    else:
        value = f"oci:{layout}" + kind[3:]
    file = resolve(value, site, True)
    assert content(file, "bin/sh") == b"shell"
    assert resolve(value, site, True) == file
    assert leftovers(images) == []


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("oci:/nonexistent", "cannot be read"),
        ("docker-archive:/nonexistent", "No such file"),
        ("/nonexistent/app.sif", "No such file"),
        ("docker-archive:/dev/null", "not a regular file"),
    ],
)
def test_pull_of_unreadable_file_is_refused(value: str, why: str, images: Cache, site: Any) -> None:
    with pytest.raises(Refused, match=why):
        resolve(value, site, True)
    assert files(images) == []


def test_pull_without_skopeo_names_package(
    images: Cache, site: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(HostFault, match=r"needs skopeo, which is not installed.*package skopeo"):
        resolve("docker://debian:12", site, True)


def test_skopeo_ends_with_a_killed_submission(tmp_path: Path, images: Cache) -> None:
    """A registry that never answers would otherwise keep skopeo running."""
    program, pid = tmp_path / "skopeo", tmp_path / "pid"
    program.write_text(f"#!/bin/sh\necho $$ >{pid}.part && mv {pid}.part {pid}\nexec sleep 3600\n")
    program.chmod(0o755)
    code = "from vtorque_own_images import skopeo; from vtorque_own_images.reference import parse; "
    code += "from pathlib import Path; skopeo.manifest(parse('docker://a.org/b', Path()), 1)"
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    with subprocess.Popen([sys.executable, "-c", code], env=environ) as submission:
        eventually(pid.exists)
        submission.kill()
    with contextlib.suppress(ProcessLookupError):
        handle = os.pidfd_open(int(pid.read_text()))
        try:
            eventually(lambda: wait_readable([handle], 0))
        finally:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
            os.close(handle)


def test_pull_on_full_disk_is_reported_and_leaves_nothing(
    layout: Path, images: Cache, site: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(convert, "write", failing)
    with pytest.raises(Refused, match=r"quota is used up.*vmgr images remove"):
        resolve(f"oci:{layout}", site, True)
    assert files(images) == []


def test_pull_of_image_larger_than_limit_names_setting(layout: Path, images: Cache) -> None:
    big = as_directory(layout_files([layer(("big", bytes(3 << 20), "f"))]), layout / "big")
    site: Any = PersonalSite(max_size=2)
    with pytest.raises(Refused, match=r"max_size"):
        resolve(f"oci:{big}", site, True)


def test_pull_of_layers_larger_than_limit_copies_nothing(
    registry: Registry, images: Cache, tmp_path: Path
) -> None:
    parts = [layer((str(number), os.urandom(1 << 20), "f")) for number in range(3)]
    made = as_directory(layout_files(parts), tmp_path / "made")
    value = registry.push(made, "big:1")
    for blob in registry.blobs():  # a copy would fail for another reason
        if blob.read_bytes()[:2] == GZIP:
            blob.unlink()
    why = r"has layers of 3 MiB \(limit: 2 MiB, set by twice \[plugin.own-images\] max_size\)"
    with pytest.raises(Refused, match=why):
        resolve(value, PersonalSite(max_size=1), True)  # type: ignore[arg-type]
    assert files(images) == []


def with_manifest(blobs: dict[str, bytes], change: Callable[[dict[str, Any]], None]) -> None:
    """Change the manifest of a layout's image."""
    index = json.loads(blobs["index.json"])
    (described,) = index["manifests"]
    manifest = json.loads(blobs.pop(f"blobs/sha256/{described['digest'][7:]}"))
    change(manifest)
    data = json.dumps(manifest).encode()
    described |= {"digest": digest(data), "size": len(data)}
    blobs |= {f"blobs/sha256/{digest(data)[7:]}": data, "index.json": json.dumps(index).encode()}


def test_copy_stops_at_layer_larger_than_manifest_says(images: Cache, tmp_path: Path) -> None:
    blobs = layout_files([layer(("a", os.urandom(8 << 20), "f"))])
    with_manifest(blobs, lambda manifest: manifest["layers"][0].update(size=1000))
    made = as_directory(blobs, tmp_path / "made")
    with pytest.raises(Refused, match="larger than the manifest"):
        resolve(f"oci:{made}", PersonalSite(), True)  # type: ignore[arg-type]
    assert files(images) == []


@pytest.mark.parametrize("size", [-1, 1.5, True, "x", None])
def test_manifest_with_invalid_size_of_layer_is_refused(
    size: object, images: Cache, tmp_path: Path
) -> None:
    blobs = layout_files([layer(("a", b"x", "f"))])
    with_manifest(blobs, lambda manifest: manifest["layers"][0].update(size=size))
    made = as_directory(blobs, tmp_path / "made")
    with pytest.raises(Refused, match="without sizes of layers"):
        resolve(f"oci:{made}", PersonalSite(), True)  # type: ignore[arg-type]
    assert files(images) == []


def test_pull_of_index_copies_the_image_for_linux_guests(
    registry: Registry, images: Cache, site: Any, tmp_path: Path
) -> None:
    """Such an index often has an image for Windows, too."""
    listed, blobs = [], dict[str, bytes]()
    for name in ("linux", "windows"):
        found = layout_files([layer((name, b"x", "f"))])
        (described,) = json.loads(found.pop("index.json"))["manifests"]
        listed.append({**described, "platform": {"architecture": "amd64", "os": name}})
        blobs |= found
    index = json.dumps(
        {
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.index.v1+json",
            "manifests": listed,
        }
    ).encode()
    inner = f"blobs/sha256/{digest(index)[7:]}"
    top = {
        "mediaType": "application/vnd.oci.image.index.v1+json",
        "digest": digest(index),
        "size": len(index),
        "annotations": {"org.opencontainers.image.ref.name": "latest"},
    }
    blobs |= {inner: index}
    blobs["index.json"] = json.dumps({"schemaVersion": 2, "manifests": [top]}).encode()
    made = as_directory(blobs, tmp_path / "made")
    value = registry.push(made, "both:1", "--all")
    assert "linux" in listing(resolve(value, site, True))


@pytest.mark.parametrize(("name", "why"), [("{}", "max_size"), ("same", None)])
def test_limit_applies_to_all_layers_together(
    name: str, why: str | None, images: Cache, tmp_path: Path
) -> None:
    """A file of a hidden layer counts only toward the time of the conversion."""
    parts = [layer((name.format(number), bytes(700 << 10), "f")) for number in range(2)]
    made = as_directory(layout_files(parts), tmp_path / "made")
    site: Any = PersonalSite(max_size=1)
    if why is None:
        assert resolve(f"oci:{made}", site, True)
        return
    with pytest.raises(Refused, match=why):
        resolve(f"oci:{made}", site, True)


def test_layers_of_a_bomb_are_not_unpacked_to_the_end(images: Cache, tmp_path: Path) -> None:
    parts = [layer(("same", bytes((900 << 10) + number), "f")) for number in range(9)]
    made = as_directory(layout_files(parts), tmp_path / "made")
    with pytest.raises(Refused, match=r"limit of all layers is twice.*max_size"):
        resolve(f"oci:{made}", PersonalSite(max_size=1), True)


def test_pull_by_two_submissions_converts_once(
    layout: Path, images: Cache, site: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = counted(monkeypatch)
    found: list[str] = []
    threads = [
        threading.Thread(target=lambda: found.append(resolve(f"oci:{layout}", site, True)))
        for _ in range(2)
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(set(found)) == 1 and len(found) == 2
    assert calls == ["copy", "convert"]


def test_references_of_many_submissions_at_once_are_all_recorded(images: Cache) -> None:
    names = [f"oci:{number}" for number in range(20)]
    images.use("a" * 64, "oci:first")
    images.file("a" * 64).touch()
    with ThreadPoolExecutor(20) as threads:
        list(threads.map(lambda name: images.use("a" * 64, name), names))
    (found,) = images.entries()
    assert sorted(found.references) == sorted(["oci:first", *names])


def test_removed_image_is_pulled_again(layout: Path, images: Cache, site: Any) -> None:
    value = f"oci:{layout}"
    file = resolve(value, site, True)
    (row,) = (entry.table_row() for entry in images.entries())
    assert row["reference"] == value
    assert images.remove(str(row["name"]))
    assert files(images) == []
    assert not images.remove(str(row["name"]))
    assert resolve(value, site, True) == file


def test_cache_that_others_can_change_is_refused(layout: Path, images: Cache, site: Any) -> None:
    resolve(f"oci:{layout}", site, True)
    images.root.chmod(0o777)
    with pytest.raises(Refused, match="other users can change it"):
        resolve(f"oci:{layout}", site, True)


def test_cache_that_another_user_has_just_created_is_refused(images: Cache) -> None:
    """In a directory such as ``/scratch``, another user can create it after the first check."""
    images.root.mkdir(parents=True)
    images.root.chmod(0o777)
    with (
        pytest.raises(Refused, match="other users can change it"),
        images.hold_conversion("a" * 64),
    ):
        pytest.fail("the conversion began")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change the owner of a link")
def test_link_of_another_user_is_refused_as_a_cache(tmp_path: Path) -> None:
    """The other user could later replace the link."""
    (tmp_path / "of-user").mkdir(mode=0o700)
    link = tmp_path / "cache"
    link.symlink_to("of-user")
    Cache(link).check_owner()
    os.chown(link, 65534, -1, follow_symlinks=False)
    with pytest.raises(Refused, match="other users can change it"):
        Cache(link).check_owner()


def test_pull_on_site_with_administrator_is_refused_before_any_transfer(
    layout: Path, images: Cache, site: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(type(site), "owner", 0)
    calls = counted(monkeypatch)
    with pytest.raises(Refused, match="which this site does not accept"):
        resolve(f"oci:{layout}", site, True)
    assert calls == []


def test_hostile_layer_writes_nothing_outside(images: Cache, site: Any, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    hostile = layer(("a", str(tmp_path), "l"), ("a/victim", b"x", "f"))
    made = as_directory(layout_files([hostile]), tmp_path / "hostile")
    file = resolve(f"oci:{made}", site, True)
    assert not victim.exists()
    assert content(file, str(victim).lstrip("/")) == b"x"


def aged(images: Cache, value: str, seconds: float) -> str:
    """Pull an image, and return its file as if it was last used some time ago."""
    file = resolve(value, PersonalSite(), True)  # type: ignore[arg-type]
    facts = Path(file).with_suffix(".json")
    then = time.time() - seconds
    os.utime(facts, (then, then))
    return file


@pytest.fixture
def layouts(tmp_path: Path) -> list[str]:
    """Return the values of three images."""
    return [
        f"oci:{as_directory(layout_files([layer((name, b'x', 'f'))]), tmp_path / name)}"
        for name in ("one", "two", "three")
    ]


@pytest.mark.parametrize("busy", [False, True])
def test_pull_removes_old_images_unless_user_has_jobs(
    images: Cache, layouts: list[str], monkeypatch: pytest.MonkeyPatch, busy: bool
) -> None:
    old, young = aged(images, layouts[0], 3600), aged(images, layouts[1], 60)
    monkeypatch.setattr(pull, "has_jobs", lambda _: busy)
    site: Any = PersonalSite(keep=600.0)
    new = resolve(layouts[2], site, True)
    assert [Path(file).exists() for file in (old, young, new)] == [busy, True, True]


def test_pull_removes_least_recently_used_images_above_the_limit(
    images: Cache, layouts: list[str]
) -> None:
    old, young = aged(images, layouts[0], 3600), aged(images, layouts[1], 60)
    new = Path(resolve(layouts[2], PersonalSite(), True))  # type: ignore[arg-type]
    sizes = [Path(file).stat().st_size for file in (young, new)]
    assert [each.digest for each in images.prune(1e9, sum(sizes))] == [Path(old).stem]
    assert [each.digest for each in images.prune(1e9, 1)] == [Path(young).stem]
    assert images.prune(1e9, 1) == []
    assert new.exists()


def test_listing_of_unused_cache_creates_nothing(images: Cache, site: Any) -> None:
    assert cache_of(site).entries() == []
    assert not images.remove("own:0123456789ab")
    assert not images.root.exists()


def test_jobs_count_if_the_batch_system_does_not_answer(site: Any) -> None:
    assert pull.has_jobs(site)
