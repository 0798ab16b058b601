"""Signed images in the pool, in copies and at the start of a job: refusals of a node."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import Result

from image_keys import BUILT, allow, keygen, keys, signers
from vtorque_cluster.cache import ImagePlaces, take
from vtorque_core.api import Paths, Refused, UsageError
from vtorque_core.api.batch_system import BatchJob
from vtorque_core.api.guest_plan import JobUser
from vtorque_core.api.image_builder import BuiltImage
from vtorque_core.api.node_job import Site
from vtorque_core.api.values import JobRequest
from vtorque_core.base import trust
from vtorque_core.images.pool import select
from vtorque_core.live import images as live_images
from vtorque_core.live.images import (
    FileRecord,
    Plugins,
    Sidecar,
    describe,
    lookup,
    names,
    signer_of,
    store,
    version_of,
)
from vtorque_core.plan import guests
from vtorque_images import change as images
from vtorque_images import health as doctor_images
from vtorque_images import pool_commands as command
from vtorque_images.check import file_sha256
from vtorque_images.signing import sign
from vtorque_testing import vmgr
from vtorque_testing.planned import site as a_site

__all__ = ["allow", "keys", "signers"]  # fixtures


def put(pool: Path, name: str, key: Path | None = None, kernel: bytes = b"kernel") -> Sidecar:
    with store.staging(pool) as staging:
        (staging / "k").write_bytes(kernel)
        (staging / "i").write_bytes(b"initrd")
        by = None if key is None else (lambda new: sign(new, key))
        options = images.CommitOptions(sign=by)
        images.commit(pool, name, staging, BUILT, "test", options=options)
    return describe(pool, name)


def rewrite(pool: Path, name: str, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a sidecar as an attacker can who has write access to the pool."""
    path = pool / name / "image.json"
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


# -- At a job's start ------------------------------------------------------------------------------


def looked_up(pool: Path, name: str, signers: Path, cache: Path | None = None) -> Any:
    return lookup(pool, name, cache, signers)


def tamper_cmdline(data: dict[str, Any]) -> None:
    data["cmdline"] += " init=/bin/sh"


def tamper_label(data: dict[str, Any]) -> None:
    data["labels"]["agent"] = "builtin"


def tamper_guest(data: dict[str, Any]) -> None:
    data["guest_type"] = "osv"


def tamper_roles(data: dict[str, Any]) -> None:
    data["kernel"], data["initrd"] = data["initrd"], data["kernel"]
    data["sha256"] = parse_again(data).sha256


def tamper_initrd(data: dict[str, Any]) -> None:
    data["initrd"] = None
    del data["files"]["i"]
    data["sha256"] = parse_again(data).sha256


def parse_again(data: dict[str, Any]) -> Sidecar:
    facts = {field.name: data[field.name] for field in dataclasses.fields(BuiltImage)}
    records = {name: FileRecord(**record) for name, record in data["files"].items()}
    return Sidecar(data["name"], BuiltImage(**facts), data["version"], "", "", records)


@pytest.mark.parametrize(
    "change", [tamper_cmdline, tamper_label, tamper_guest, tamper_roles, tamper_initrd]
)
def test_changed_sidecar_is_refused(
    pool: Path, keys: Path, signers: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    put(pool, "m", keys / "site")
    assert looked_up(pool, "m", signers).name == "m"
    rewrite(pool, "m", change)
    assert lookup(pool, "m").name == "m", (
        "the change is detected without the signature: this test shows nothing"
    )
    with pytest.raises(Refused, match=r"img=m: the signature is not valid .*incorrect"):
        looked_up(pool, "m", signers)


def put_swapped(pool: Path, key: Path | None, *, hashes: bool) -> None:
    """Make an image, replace its kernel, and adapt the sidecar."""
    home = pool / "m"
    old = put(pool, "m", key)
    (home / old.version / "k").write_bytes(b"evil!!")
    status = (home / old.version / "k").stat()
    digest = file_sha256(home / old.version / "k") if hashes else old.files["k"].sha256
    files = {**old.files, "k": FileRecord.from_status(digest, status)}
    version = version_of(BUILT, {name: record.sha256 for name, record in files.items()})
    (home / old.version).rename(home / version)
    new = replace(old, files=files, version=version)
    (home / "image.json").write_text(json.dumps(new.as_json()))


def test_swapped_file_is_refused(pool: Path, keys: Path, signers: Path) -> None:
    sidecar = put(pool, "m", keys / "site")
    (pool / "m" / sidecar.version / "k").write_bytes(b"evil!!")
    with pytest.raises(Refused, match="k is not the file that was hashed"):
        looked_up(pool, "m", signers)


def test_swapped_file_with_new_hashes_is_refused(pool: Path, keys: Path, signers: Path) -> None:
    put_swapped(pool, keys / "site", hashes=True)
    assert images.verify(pool, "m").name == "m", (
        "the change is detected without the signature: this test shows nothing"
    )
    with pytest.raises(Refused, match="incorrect signature"):
        looked_up(pool, "m", signers)


def test_swapped_file_with_a_forged_status_is_found_by_hashing(
    pool: Path, keys: Path, signers: Path
) -> None:
    """Only root on the pool's host can do that; ``verify`` and every copy compute hashes."""
    put_swapped(pool, keys / "site", hashes=False)
    assert looked_up(pool, "m", signers).name == "m"
    with pytest.raises(Refused, match="k has sha256"):
        images.verify(pool, "m")


def test_signed_image_under_another_name_is_refused(
    pool: Path, keys: Path, signers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(images, "effective_root", lambda: True)
    put(pool, "m", keys / "site")
    shutil.copytree(pool / "m", pool / "n")
    rewrite(pool, "n", lambda data: data.update(name="n"))
    images.verify(pool, "n")
    with pytest.raises(Refused, match=r"img=n: the signature is not valid .*incorrect"):
        looked_up(pool, "n", signers)


def test_default_image_must_be_signed(pool: Path, keys: Path, signers: Path) -> None:
    put(pool, "m")
    with pytest.raises(Refused, match="not signed"):
        select(pool, None, "micro", None, None, signers)
    put(pool, "m", keys / "site")
    assert select(pool, None, "micro", None, None, signers).name == "m"


# -- Copies ----------------------------------------------------------------------------------------


def sent(pool: Path, cache: Path, top: Path) -> list[str]:
    """Copy all images into a cache; return those that are new there."""
    copies = cache / ".partial"
    shutil.copytree(pool, copies)
    new = take(ImagePlaces(pool, cache, Paths(top / "state", top / "run")), copies, names(pool))
    copies.rmdir()
    return new


def test_copy_is_used_if_the_sidecar_of_the_pool_is_signed(
    pool: Path, keys: Path, signers: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    put(pool, "m", keys / "site")
    sent(pool, cache, tmp_path)
    assert looked_up(pool, "m", signers, cache).kernel.is_relative_to(cache)
    rewrite(pool, "m", tamper_cmdline)
    with pytest.raises(Refused, match="incorrect signature"):
        looked_up(pool, "m", signers, cache)
    shutil.rmtree(pool)
    assert looked_up(pool, "m", signers, cache).cmdline == BUILT.cmdline


def test_copy_gets_labels_and_signatures_added_later(
    pool: Path, keys: Path, signers: Path, tmp_path: Path
) -> None:
    cache = tmp_path / "cache"
    put(pool, "m")
    assert sent(pool, cache, tmp_path) == ["m"]
    before = describe(cache, "m")
    images.label(pool, "m", {"site": "hpc"})
    found = describe(pool, "m")
    images.attach(pool, found, sign(found, keys / "site"))
    assert sent(pool, cache, tmp_path) == []
    after = describe(cache, "m")
    assert signer_of(after, signers) == "admin@site"
    assert (after.built.labels["site"], after.files) == ("hpc", before.files)


# -- Changes ---------------------------------------------------------------------------------------


def test_signature_is_dropped_when_content_or_labels_change(pool: Path, keys: Path) -> None:
    first = put(pool, "m", keys / "site")
    assert put(pool, "m").signature == first.signature, "equal content lost its signature"
    images.verify(pool, "m")
    assert describe(pool, "m").signature == first.signature
    images.label(pool, "m", {"init": "micro"})
    assert describe(pool, "m").signature == first.signature
    assert images.label(pool, "m", {"x": "y"}).signature == ""
    put(pool, "m", keys / "site")
    assert put(pool, "m", kernel=b"other").signature == ""


def test_image_changed_in_between_is_not_signed(pool: Path, keys: Path) -> None:
    seen = put(pool, "m")
    put(pool, "m", kernel=b"other")
    with pytest.raises(Refused, match="another command changed image m"):
        images.attach(pool, seen, sign(seen, keys / "site"))
    assert describe(pool, "m").signature == ""


# -- Jobs, doctor, commands ------------------------------------------------------------------------


def site_with(pool: Path, signers: Path | str) -> Site:
    return a_site(images={"pool": pool, "signers": signers})


def planned(site: Site) -> Any:
    plugins = Plugins.load(node=False, only=("linux-guest",))
    values = {option.key: option.default for option in plugins.options().values()}
    request = JobRequest(values | {"img": "m"})
    user = JobUser("u", 1000, 1000, (("u", 1000),), "/home/u", "/bin/sh")
    job = BatchJob("7", "u", "n1", ("n1",), b"", attempt=1)
    return guests.plan_guests(guests.JobContext(job, user, site, plugins, b"s" * 32), request)


def test_job_gets_no_guest_from_an_unsigned_image(pool: Path, keys: Path, signers: Path) -> None:
    put(pool, "m", keys / "stranger")
    assert planned(site_with(pool, "")), "a site without signers refuses the image"
    with pytest.raises(Refused, match=f"No principal matched.*one of {signers}"):
        planned(site_with(pool, signers))
    put(pool, "m", keys / "site")
    assert planned(site_with(pool, signers))


def test_doctor_names_unsigned_images(pool: Path, keys: Path, signers: Path) -> None:
    put(pool, "a", keys / "site")
    put(pool, "b")
    found = {(r.status, r.message) for r in doctor_images.check_pool(site_with(pool, signers))}
    assert ("ok", f"1 images are signed by one of {signers}") in found
    (warned,) = [text for status, text in found if status == "warning"]
    assert warned.startswith("img=b: the image is not signed")
    signers.unlink()
    found = {(r.status, r.message) for r in doctor_images.check_pool(site_with(pool, signers))}
    assert any(status == "failed" and str(signers) in text for status, text in found)


@pytest.mark.parametrize("there", [True, False])
def test_doctor_reports_missing_firmware_of_images(pool: Path, there: bool) -> None:
    by_uefi = BuiltImage(
        "linux", "d", "x86_64", 64, disk="d", disk_format="raw", labels={"firmware": "efi"}
    )
    with store.staging(pool) as staging:
        (staging / "d").write_bytes(bytes(512))
        images.commit(pool, "a", staging, by_uefi, "test")
    put(pool, "b")  # no firmware boots a kernel
    images.label(pool, "b", {"firmware": "efi"})
    firmware = pool.parent / "OVMF.fd"
    if there:
        firmware.touch()
    site = a_site(images={"pool": pool}, node={"uefi": firmware})
    found = [r.message for r in doctor_images.check_pool(site) if "UEFI" in r.message]
    assert found == ([] if there else [f"image a boots by UEFI; there is no {firmware}"])


@pytest.fixture
def run(
    pool: Path, signers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Result]:
    config = tmp_path / "site.toml"
    paths = f'[paths]\nstate = "{tmp_path}/state"\nrun = "{tmp_path}/run"\n'
    config.write_text(f'[images]\npool = "{pool}"\nkeep = 0\nsigners = "{signers}"\n{paths}')
    for module in (command, live_images):
        monkeypatch.setattr(module, "effective_root", lambda: True)
    check = trust.require_root_owned
    monkeypatch.setattr(trust, "require_root_owned", lambda path, **_: check(path, os.geteuid()))

    def call(*argv: object) -> Result:
        return vmgr.run(config, "images", *argv)

    return call


def test_signed_image_is_verified_with_its_signer(
    pool: Path, keys: Path, run: Callable[..., Result]
) -> None:
    put(pool, "m")
    before = run("verify")
    assert before.exit_code == 1
    assert "img=m: the image is not signed" in before.stderr
    done = run("sign", "m", "--key", keys / "site")
    assert (done.exit_code, done.stdout) == (0, "m is signed by admin@site\n")
    assert run("verify").stdout.endswith(", signed by admin@site\n")
    assert json.loads(run("verify", "--json").stdout)[0]["signed_by"] == "admin@site"
    labelled = run("label", "m", "x=y")
    assert (
        "note: the signature of m is invalid now, because the labels have changed"
        in labelled.stderr
    )
    assert run("verify").exit_code == 1


def test_image_can_be_signed_with_an_external_key(
    pool: Path, keys: Path, run: Callable[..., Result], tmp_path: Path
) -> None:
    put(pool, "m")
    file = tmp_path / "payload"
    file.write_text(run("sign", "m", "--payload").stdout)
    keygen("-Y", "sign", "-f", keys / "other", "-n", "vtorque-image", file)
    done = run("sign", "m", "--signature", f"{file}.sig", "--json")
    assert json.loads(done.stdout)["signed_by"] == "hsm"
    assert run("verify").exit_code == 0


def test_failed_signing_keeps_the_old_signature(
    pool: Path, keys: Path, run: Callable[..., Result], tmp_path: Path
) -> None:
    before = put(pool, "m", keys / "site").signature
    (tmp_path / "junk").write_text("junk")
    for argv, words in (
        (("--key", keys / "stranger"), "No principal matched"),
        (("--key", tmp_path / "none"), "No such file"),
        (("--signature", tmp_path / "junk"), "is not a valid signature of the current image m"),
        (("--signature", tmp_path / "none"), "No such file"),
    ):
        failed = run("sign", "m", *argv)
        assert isinstance(failed.exception, Refused)
        assert words in str(failed.exception)
    for wrong in ((), ("--payload", "--key", keys / "site")):
        assert isinstance(run("sign", "m", *wrong).exception, UsageError)
    assert describe(pool, "m").signature == before


def test_damaged_image_is_not_signed(pool: Path, keys: Path, run: Callable[..., Result]) -> None:
    put_swapped(pool, None, hashes=False)
    failed = run("sign", "m", "--key", keys / "site")
    assert "k has sha256" in str(failed.exception)
    assert describe(pool, "m").signature == ""


def test_added_image_is_signed_immediately_or_refused(
    pool: Path, keys: Path, run: Callable[..., Result], tmp_path: Path
) -> None:
    kernel = bytes.fromhex("7f454c46020101") + bytes(9) + b"\2\0\x3e\0\1\0\0\0" + bytes(64)
    (tmp_path / "k").write_bytes(kernel)
    described = ("--guest-type", "linux", "--distro", "micro", "--arch", "x86_64")
    added = run("add", tmp_path / "k", "m", *described, "--sign-key", keys / "site")
    assert added.exit_code == 0, added.output
    assert "jobs cannot use it yet" not in added.stderr
    assert run("verify").exit_code == 0
    (tmp_path / "k").write_bytes(kernel + b"new")
    updated = run("update", "m", tmp_path / "k")
    assert "note: jobs cannot use it yet: img=m: the image is not signed" in updated.stderr
    failed = run("update", "m", tmp_path / "k", "--sign-key", tmp_path / "none")
    assert "No such file" in str(failed.exception)
