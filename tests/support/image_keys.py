"""Create keys that sign images, and configure which keys are trusted."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from vtorque_core.api.image_builder import BuiltImage
from vtorque_core.images.signature import NAMESPACE

BUILT = BuiltImage(
    guest_type="linux",
    distro="micro",
    arch="x86_64",
    min_ram_mib=64,
    kernel="k",
    initrd="i",
    cmdline="console=ttyS0",
    labels={"init": "micro", "b": "a"},
)


def keygen(*argv: object) -> None:
    words = [str(word) for word in argv]
    subprocess.run(["ssh-keygen", "-q", *words], check=True, timeout=180, capture_output=True)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the keys ``site``, ``other`` and ``stranger``."""
    top = tmp_path_factory.mktemp("keys")
    for name in ("site", "other", "stranger"):
        keygen("-t", "ed25519", "-N", "", "-C", "", "-f", top / name)
    return top


@pytest.fixture
def allow(tmp_path: Path, keys: Path) -> Callable[..., Path]:
    """Return a function that writes the allowed signers: name, key, options."""

    def write(*lines: tuple[str, str, str]) -> Path:
        path = tmp_path / "signers"
        texts = [f"{who} {options} {public(keys / key)}\n" for who, key, options in lines]
        path.write_text("# of the site\n" + "".join(texts))
        path.chmod(0o644)
        return path

    return write


def public(key: Path) -> str:
    return key.with_suffix(".pub").read_text().strip()


@pytest.fixture
def signers(allow: Callable[..., Path]) -> Path:
    return allow(("admin@site", "site", ""), ("hsm", "other", f'namespaces="{NAMESPACE}"'))
