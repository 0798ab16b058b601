"""Signatures of images: signed bytes, allowed signers, and refusals on a node."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from image_keys import BUILT, allow, keygen, keys, signers
from vtorque_core.api.image_builder import BuiltImage
from vtorque_core.base.errors import HostFault, Refused
from vtorque_core.images import signature
from vtorque_core.images.sidecar import MAX_SIGNATURE, FileRecord, Sidecar, parse_sidecar
from vtorque_core.images.signature import NAMESPACE, signed_bytes, signer_of
from vtorque_images.signing import check_well_made, sign

__all__ = ["allow", "keys", "signers"]  # fixtures

EXAMPLE = Sidecar(
    "m",
    BUILT,
    "v" + "0" * 32,
    "test",
    "2026-01-01T00:00:00+00:00",
    {"k": FileRecord("1" * 64, 5, 6, 7), "i": FileRecord("2" * 64, 8, 9, 10)},
)


# -- Signed data -----------------------------------------------------------------------------------


def test_signed_bytes_have_the_documented_form() -> None:
    """Any other form than an older vTorque's would invalidate all signatures."""
    assert signed_bytes(EXAMPLE) == (
        b'{"arch":"x86_64","cmdline":"console=ttyS0","disk":null,"disk_format":"qcow2",'
        b'"distro":"micro","files":{"i":"%s","k":"%s"},"guest_type":"linux","initrd":"i",'
        b'"kernel":"k","labels":{"b":"a","init":"micro"},"min_ram_mib":64,"name":"m",'
        b'"schema":1,"sha256":"%s","version":"v%s"}'
    ) % (b"2" * 64, b"1" * 64, EXAMPLE.sha256.encode(), b"0" * 32)


@pytest.mark.parametrize("key", [field.name for field in dataclasses.fields(BuiltImage)])
def test_every_field_of_the_image_is_signed(key: str) -> None:
    other: dict[str, Any] = {"labels": {"init": "cloud-init"}, "min_ram_mib": 65}
    changed = replace(BUILT, **{key: other.get(key, "other")})
    assert signed_bytes(changed_sidecar(built=changed)) != signed_bytes(EXAMPLE)


def changed_sidecar(built: BuiltImage) -> Sidecar:
    files = {**EXAMPLE.files, "other": EXAMPLE.files["k"]}
    kept = {name: files[name] for name in (built.disk, built.kernel, built.initrd) if name}
    return replace(EXAMPLE, built=built, files=kept)


def test_fields_that_differ_between_copies_are_not_signed() -> None:
    moved = {name: replace(r, mtime_ns=1, inode=2) for name, r in EXAMPLE.files.items()}
    copy = replace(EXAMPLE, files=moved, builder="x", created="y", verified="z", signature="s")
    assert signed_bytes(copy) == signed_bytes(EXAMPLE)
    again = parse_sidecar(json.dumps(copy.as_json()).encode(), "m")
    assert signed_bytes(again) == signed_bytes(EXAMPLE)
    assert again.signature == "s"


@pytest.mark.parametrize("value", [5, None, "x" * (MAX_SIGNATURE + 1), "\N{BULLET}"])
def test_signature_that_is_not_short_text_makes_a_sidecar_invalid(value: object) -> None:
    data = {**EXAMPLE.as_json(), "signature": value}
    with pytest.raises(ValueError, match=r"has over \d+ bytes or is not ASCII|^signature: is "):
        parse_sidecar(json.dumps(data).encode(), "m")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"size": True}, "files: size: is True, but must be a whole number"),
        ({"inode": None}, "files: inode: is None, but must be a whole number"),
        ({"sha256": "x"}, "has a bad sha256"),
    ],
)
def test_invalid_file_record_makes_a_sidecar_invalid(change: dict[str, Any], problem: str) -> None:
    data = EXAMPLE.as_json()
    data["files"] = {name: {**record, **change} for name, record in data["files"].items()}
    with pytest.raises(ValueError, match=re.escape(problem)):
        parse_sidecar(json.dumps(data).encode(), "m")


# -- Accepted signers ------------------------------------------------------------------------------


def signed(keys: Path, key: str = "site") -> Sidecar:
    return replace(EXAMPLE, signature=sign(EXAMPLE, keys / key))


def test_allowed_signer_is_named(keys: Path, signers: Path) -> None:
    assert signer_of(signed(keys), signers) == "admin@site"
    assert signer_of(signed(keys, "other"), signers) == "hsm"


@pytest.mark.parametrize(
    ("who", "options", "named"),
    [
        ("*@site", "", "*@site"),
        ("a@site,b@site", "", "a@site"),
        ("a", f'namespaces="git,{NAMESPACE}",valid-after="20200101"', "a"),
        ("a", 'valid-before="29990101"', "a"),
    ],
)
def test_lines_of_an_allowed_signers_file_are_parsed(
    keys: Path, allow: Callable[..., Path], who: str, options: str, named: str
) -> None:
    assert signer_of(signed(keys), allow((who, "site", options))) == named


def test_expired_line_of_a_key_does_not_hide_a_valid_one(
    keys: Path, allow: Callable[..., Path]
) -> None:
    old, new = 'valid-before="20200101"', 'valid-after="20200101"'
    assert signer_of(signed(keys), allow(("old", "site", old), ("new", "site", new))) == "new"


@pytest.mark.parametrize(
    ("key", "options", "words"),
    [
        ("stranger", "", "No principal matched"),
        ("site", 'valid-before="20200101"', "key has expired"),
        ("site", 'valid-after="29980101"', "key is not yet valid"),
        ("site", 'namespaces="git"', "namespace"),
    ],
)
def test_signature_of_a_disallowed_key_is_refused(
    keys: Path, allow: Callable[..., Path], key: str, options: str, words: str
) -> None:
    allowed = allow(("admin@site", "site", options))
    with pytest.raises(Refused, match=words) as refused:
        signer_of(signed(keys, key), allowed)
    assert refused.value.refusals[0].value == "m"
    assert "vmgr images sign m --key FILE" in str(refused.value)
    assert str(allowed) in str(refused.value)


def test_empty_allowed_signers_file_refuses_every_image(
    keys: Path, allow: Callable[..., Path]
) -> None:
    with pytest.raises(Refused, match="No principal matched"):
        signer_of(signed(keys), allow())


def test_image_without_a_signature_is_refused(signers: Path) -> None:
    with pytest.raises(Refused, match="the image is not signed; this site only"):
        signer_of(EXAMPLE, signers)


@pytest.mark.parametrize("text", ["junk", "-----BEGIN SSH SIGNATURE-----\n", "\x00", "-f/etc/x"])
def test_malformed_signature_is_refused(signers: Path, text: str) -> None:
    with pytest.raises(Refused, match="the signature is not valid"):
        signer_of(replace(EXAMPLE, signature=text), signers)
    with pytest.raises(Refused, match="is not a valid signature"):
        check_well_made(EXAMPLE, text)


def test_signature_for_another_namespace_is_refused(
    keys: Path, signers: Path, tmp_path: Path
) -> None:
    """The form that a key which also signs commits would make of the same bytes."""
    (tmp_path / "d").write_bytes(signed_bytes(EXAMPLE))
    keygen("-Y", "sign", "-f", keys / "site", "-n", "git", tmp_path / "d")
    text = (tmp_path / "d.sig").read_text()
    with pytest.raises(Refused, match="namespace does not match"):
        signer_of(replace(EXAMPLE, signature=text), signers)
    with pytest.raises(Refused, match="namespace does not match"):
        check_well_made(EXAMPLE, text)


def test_signature_of_another_image_is_refused(keys: Path, signers: Path) -> None:
    other = replace(EXAMPLE, name="n", signature=signed(keys).signature)
    with pytest.raises(Refused, match="incorrect signature"):
        signer_of(other, signers)


def test_missing_signers_file_or_ssh_keygen_is_a_host_fault(
    keys: Path, signers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(HostFault, match=r"signers = .*none: No such file.*ALLOWED SIGNERS"):
        signer_of(signed(keys), tmp_path / "none")
    signers.chmod(0o666)
    with pytest.raises(HostFault, match=r"can be written by others than root .*: chmod go-w"):
        signer_of(signed(keys), signers)
    signers.chmod(0o644)
    monkeypatch.setattr(signature, "_PATH", str(tmp_path))
    with pytest.raises(HostFault, match=r"ssh-keygen: not found in .*: install openssh-client"):
        signer_of(signed_before(keys, monkeypatch), signers)


def signed_before(keys: Path, monkeypatch: pytest.MonkeyPatch) -> Sidecar:
    with monkeypatch.context() as patch:
        patch.setattr(signature, "_PATH", "/usr/bin")
        return signed(keys)


def test_unusable_private_key_is_refused(keys: Path, tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"ssh-keygen cannot sign with this key: .*No such file"):
        sign(EXAMPLE, tmp_path / "none")
    (tmp_path / "open").write_bytes((keys / "site").read_bytes())
    (tmp_path / "open").chmod(0o644)
    with pytest.raises(Refused, match=r"ssh-keygen cannot sign with this key"):
        sign(EXAMPLE, tmp_path / "open")
