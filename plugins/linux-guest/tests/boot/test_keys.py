"""Keys of a job: derived, valid for OpenSSH, and different from other jobs'."""

from __future__ import annotations

import dataclasses
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_ssh_private_key,
)

from vtorque_core.api.guest_plan import Address
from vtorque_linux_guest.boot import keys
from vtorque_linux_guest.boot.ssh_client import client_files
from vtorque_testing.planned import guest_plan

SECRET = bytes(range(32))


def test_same_secret_gives_the_same_key_on_every_node() -> None:
    assert keys.user_key(SECRET).public == keys.user_key(SECRET).public
    # Fixed: an upgrade of one node must not separate it from the others.
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
def test_private_key_is_in_openssh_format_and_matches_the_public_key(pair: keys.KeyPair) -> None:
    assert pair.private.startswith("-----BEGIN OPENSSH PRIVATE KEY-----\n")
    loaded = load_ssh_private_key(pair.private.encode(), None)
    assert (
        loaded.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
        == pair.public
    )
    assert pair.private not in repr(pair)


@pytest.mark.integration
def test_ssh_keygen_accepts_the_key(tmp_path: Path) -> None:
    tool = shutil.which("ssh-keygen")
    assert tool is not None, "ssh-keygen is missing: apt-get install openssh-client"
    file = tmp_path / "key"
    file.write_text(keys.user_key(SECRET).private)
    file.chmod(0o600)
    shown = subprocess.run([tool, "-y", "-f", file], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == keys.user_key(SECRET).public


def test_known_hosts_lists_every_guest_with_its_key() -> None:
    lines = keys.known_hosts(SECRET, [("vn1", "10.0.0.1"), ("vn2", "")]).splitlines()
    assert lines == [
        f"vn1,10.0.0.1 {keys.host_key(SECRET, 'vn1').public}",
        f"vn2 {keys.host_key(SECRET, 'vn2').public}",
    ]


@pytest.mark.parametrize(("rank", "reached"), [(0, ["vn1", "vn2"]), (1, ["vn1"])])
def test_first_guest_has_the_client_configuration_of_all_guests(
    rank: int, reached: list[str]
) -> None:
    """ssh itself reads it: a guest may have been moved to a node outside the job."""
    plan = guest_plan(
        rank=rank, hostname="vn1", addresses=(Address("52:54:00:00:00:01", "10.86.0.16", 16),),
        peers=(("vn1", "10.86.0.16"), ("vn2", "10.86.1.16"), ("vn3", "")),
        image=dataclasses.replace(guest_plan().image, labels={"init": "cloud-init"}),
    )  # fmt: skip
    files = {Path(each.path).name: each.content.decode() for each in client_files(plan)}
    hosts = re.findall("^Host (.*)$", files["ssh_config"], re.MULTILINE)
    assert hosts == [*reached, "*"]
    assert [line.split(",")[0] for line in files["ssh_known_hosts"].splitlines()] == reached
    for name in reached:
        said = subprocess.run(
            ["ssh", "-G", "-F", "/dev/stdin", name], input=files["ssh_config"], text=True,
            capture_output=True, check=True,
        ).stdout.splitlines()  # fmt: skip
        address = dict(plan.peers)[name]
        assert {f"hostname {address}", f"hostkeyalias {name}", "user ada"} <= {*said}
        assert "stricthostkeychecking true" in said and "escapechar none" in said
