"""Keys of a job: derived, valid for OpenSSH, and different where they must be."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_ssh_private_key,
)

from vtorque_linux_guest.boot import keys

SECRET = bytes(range(32))


def test_same_secret_same_key_on_every_node() -> None:
    assert keys.user_key(SECRET).public == keys.user_key(SECRET).public
    # Fixed: an upgrade of one node must not part it from the others.
    assert keys.user_key(SECRET).public == (
        "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGH2dlQDtsXY39pkn16xsmB0rOCodV5x/pQvnrj4qLoI"
    )
    assert keys.host_key(SECRET, "vn1").public == (
        "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIGwXgEWZf+x8Gf4+PnHownzo0vaHeOMl6hCNfmSMtwel"
    )


def test_no_two_purposes_jobs_or_hosts_share_a_key() -> None:
    publics = {
        keys.user_key(SECRET).public,
        keys.user_key(b"other" * 8).public,
        keys.host_key(SECRET, "vn1").public,
        keys.host_key(SECRET, "vn2").public,
        keys.host_key(b"other" * 8, "vn1").public,
    }
    assert len(publics) == 5


@pytest.mark.parametrize("pair", [keys.user_key(SECRET), keys.host_key(SECRET, "vn1")])
def test_private_key_is_openssh_and_belongs_to_the_public_one(pair: keys.KeyPair) -> None:
    assert pair.private.startswith("-----BEGIN OPENSSH PRIVATE KEY-----\n")
    loaded = load_ssh_private_key(pair.private.encode(), None)
    assert (
        loaded.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
        == pair.public
    )
    assert pair.private not in repr(pair)


@pytest.mark.integration
def test_ssh_keygen_takes_the_key(tmp_path: Path) -> None:
    tool = shutil.which("ssh-keygen")
    assert tool is not None, "apt-get install openssh-client"
    file = tmp_path / "key"
    file.write_text(keys.user_key(SECRET).private)
    file.chmod(0o600)
    shown = subprocess.run([tool, "-y", "-f", file], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == keys.user_key(SECRET).public


def test_known_hosts_has_every_guest_with_its_own_key() -> None:
    lines = keys.known_hosts(SECRET, [("vn1", "10.0.0.1"), ("vn2", "")]).splitlines()
    assert lines == [
        f"vn1,10.0.0.1 {keys.host_key(SECRET, 'vn1').public}",
        f"vn2 {keys.host_key(SECRET, 'vn2').public}",
    ]
