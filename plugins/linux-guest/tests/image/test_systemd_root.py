"""Changes of the builder to an installed system, without booting it."""

from __future__ import annotations

import pytest

from vtorque_core.api import Refused
from vtorque_linux_guest.image import systemd_root
from vtorque_linux_guest.image.filetree import FileTree

SYSTEM = {
    "usr/lib/systemd/systemd": b"",
    "usr/bin/cloud-init": b"",
    "usr/lib/systemd/system/cloud-init.target": b"[Unit]\n",
    "usr/lib/systemd/system/ssh.service": b"[Install]\nWantedBy=multi-user.target\n",
}
UNITS = "etc/systemd/system"
GENERATOR = "etc/systemd/system-generators/cloud-init-generator"


def finished(files: dict[str, bytes]) -> FileTree:
    tree = FileTree()
    for path, content in files.items():
        tree.file(path, content, 0o755)
    systemd_root.finish(tree, "debian", b"agent", 2_000_000_000)
    return tree


def target(tree: FileTree, path: str) -> bytes | None:
    node = tree.find(path, follow=False)
    return None if node is None else node.read(4096)


def test_cloud_init_is_wanted_without_a_search_for_data() -> None:
    tree = finished(SYSTEM)
    wants = f"{UNITS}/multi-user.target.wants"
    assert (
        target(tree, f"{wants}/cloud-init.target") == b"/usr/lib/systemd/system/cloud-init.target"
    )
    assert target(tree, GENERATOR) == b"/dev/null"
    assert target(tree, f"{UNITS}/cloud-init.service") == b"/dev/null"
    assert target(tree, f"{UNITS}/cloud-init-local.service") is None


def test_cloud_init_generator_is_kept_without_its_target() -> None:
    tree = finished({k: v for k, v in SYSTEM.items() if not k.endswith("cloud-init.target")})
    assert target(tree, GENERATOR) is None


def test_sshd_is_not_restarted_after_the_setup() -> None:
    tree = finished(SYSTEM)
    assert target(tree, f"{UNITS}/multi-user.target.wants/ssh.service") is not None
    found = tree.find("etc/cloud/cloud.cfg.d/90-vtorque.cfg")
    assert found is not None
    _, _, later = found.read(4096).decode().partition("cloud_config_modules:")
    assert later
    assert "set-passwords" not in later
    assert "ssh]" not in later


@pytest.mark.parametrize("missing", ["usr/lib/systemd/systemd", "usr/bin/cloud-init"])
def test_system_that_would_not_boot_is_refused(missing: str) -> None:
    with pytest.raises(Refused, match="would not boot"):
        finished({k: v for k, v in SYSTEM.items() if k != missing})


def test_only_cloud_init_waits_for_a_missing_seed() -> None:
    stages = ("cloud-init-local.service", "cloud-init-network.service")
    text = b"[Unit]\nBefore=network-pre.target\nBefore=sysinit.target\n"
    tree = finished(SYSTEM | {f"usr/lib/systemd/system/{stage}": text for stage in stages})
    for stage in stages:
        assert target(tree, f"{UNITS}/{stage}") == b"[Unit]\nBefore=network-pre.target\n"
    seed = r"dev-disk-by\x2did-virtio\x2dvtseed.device"
    waits = target(tree, f"{UNITS}/cloud-init-local.service.d/10-vtorque.conf") or b""
    assert f"Requires={seed}\nAfter={seed} vtorque-waits.service\n".encode() in waits
    assert b"infinity" in (target(tree, f"{UNITS}/{seed}.d/10-vtorque.conf") or b"")
    assert target(tree, f"{UNITS}/multi-user.target.wants/vtorque-waits.service") is not None
    assert target(tree, "usr/lib/vtorque/vtorque-waits") is not None


def test_log_files_are_removed_and_their_directories_kept() -> None:
    tree = finished(SYSTEM | {"var/log/dpkg.log": b"", "var/log/munge/munged.log": b""})
    assert target(tree, "var/log/dpkg.log") is None
    assert target(tree, "var/log/munge/munged.log") is None
    directory = tree.find("var/log/munge")
    assert directory is not None
    assert directory.is_directory
