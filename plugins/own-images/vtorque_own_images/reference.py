"""Parse a user's own image in ``-vm img=``: an image in a registry, a file or a directory."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from vtorque_core.api import Refused
from vtorque_core.api.vm_options import IMG
from vtorque_own_images.plugin import is_disk

KINDS = (
    "docker://IMAGE, oci:DIR[:TAG], docker-archive:FILE, or the path of a .sif, .qcow2 or .raw file"
)
_REGISTRY = re.compile(
    r"(?P<name>[A-Za-z0-9][A-Za-z0-9.-]*(:[0-9]+)?(/[A-Za-z0-9][A-Za-z0-9._-]*)+"
    r"|[a-z0-9][a-z0-9._-]*)"
    r"(:(?P<tag>[A-Za-z0-9_][A-Za-z0-9._-]{0,127}))?(@(?P<digest>sha256:[0-9a-f]{64}))?",
    re.ASCII,
)


@dataclass(frozen=True)
class Reference:
    """An image as the user wrote it.

    Attributes:
        kind: ``docker``, ``oci``, ``docker-archive`` or ``sif``.
        place: name in a registry, or absolute path.
        tag: tag of the image, or empty.
        digest: digest (``sha256:...``) in the reference, or empty.
    """

    written: str
    kind: str
    place: str
    tag: str = ""
    digest: str = ""

    @property
    def name(self) -> str:
        """The reference with an absolute path, or unchanged if the image is in a registry."""
        if self.kind == "docker":
            return self.written
        return self.place if self.kind == "sif" else self.skopeo_name

    @property
    def skopeo_name(self) -> str:
        """The image in the syntax of skopeo(1), section IMAGE NAMES."""
        if self.kind == "docker" and self.digest:  # skopeo refuses a tag beside a digest
            return f"docker://{self.place}@{self.digest}"
        prefix = "docker://" if self.kind == "docker" else f"{self.kind}:"
        return f"{prefix}{self.place}" + (f":{self.tag}" if self.tag else "")

    def with_digest(self, digest: str) -> Reference:
        """Return this reference with a manifest digest. A reference to a path stays unchanged."""
        if self.kind != "docker":
            return self
        return Reference(self.written, self.kind, self.place, self.tag, f"sha256:{digest}")


def parse(written: str, cwd: Path) -> Reference:
    """Parse a value of ``-vm img=``, with paths relative to ``cwd``. Raises Refused."""
    scheme, colon, rest = written.partition(":")
    if scheme == "docker" and rest.startswith("//"):
        found = _REGISTRY.fullmatch(rest[2:])
        if found is None:
            raise _refusal(written, "is not the name of an image in a registry")
        parts = (found["name"], found["tag"] or "", found["digest"] or "")
        return Reference(written, "docker", *parts)
    if colon and scheme in ("oci", "docker-archive") and rest:
        place, _, tag = rest.partition(":")
        return Reference(written, scheme, _path(place, cwd), tag)
    if written.endswith(".sif"):
        return Reference(written, "sif", _path(written, cwd))
    if is_disk(written):
        raise Refused(
            "is a disk file: jobs use it in place, so it is never copied",
            key=IMG.key,
            value=written,
        )
    raise _refusal(written, "is neither the name of an image nor a supported file")


def _path(text: str, cwd: Path) -> str:
    try:
        return str(cwd / Path(text).expanduser())
    except RuntimeError:
        raise _refusal(text, "names the home of an unknown user") from None


def _refusal(written: str, why: str) -> Refused:
    return Refused(why, key=IMG.key, value=written, fix=f"write {KINDS}")
