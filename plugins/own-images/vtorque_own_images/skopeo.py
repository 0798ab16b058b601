"""Run skopeo(1) as the user, with the user's credentials, certificates and proxies."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from vtorque_core.api import HostFault, Refused, guard_command, printable
from vtorque_core.api.vm_options import IMG
from vtorque_oci import documents
from vtorque_oci.oci import MAX_DEPTH, texts_of
from vtorque_own_images.reference import Reference

PROGRAM = "skopeo"
MAX_MANIFEST = 4 << 20  # bytes, as in registries (github.com/distribution/distribution, manifests)
_RETRIES = "3"  # retries by skopeo, with exponential backoff, also after HTTP 429
_INSPECT_TIME = 300  # seconds

FULL = tuple(os.strerror(number).lower() for number in (errno.ENOSPC, errno.EDQUOT))
_TOO_LARGE = os.strerror(errno.EFBIG).lower()
# Words in skopeo's error output (github.com/containers/image 5.23), our message, and advice.
_PERMANENT = (
    (("unauthorized", "authentication required", "invalid username/password", "denied:"),
     "the registry refuses your credentials, or you have none for it",
     "skopeo login REGISTRY"),
    (("manifest unknown", "name unknown", "not found in oci index", "no descriptor found"),
     "there is no such image", "check name and tag"),
    (("no such file or directory", "not a directory", "permission denied"),
     "cannot be read", "check the path"),
    (("digest did not match", "unexpected eof", "does not match", "invalid checksum"),
     "is damaged or truncated", "push or save the image again"),
    (("server gave http response to https client", "certificate signed by unknown authority",
      "x509:"),
     "the registry's certificate is not trusted here",
     "install its authority in /etc/containers/certs.d/REGISTRY (containers-certs.d(5))"),
)  # fmt: skip


def manifest(reference: Reference, most: int) -> bytes:
    """Return the raw manifest or index of an image. Raises Refused, HostFault.

    ``most`` limits each temporary file of skopeo in bytes, because skopeo decompresses archives.
    """
    argv = ("inspect", "--raw", "--retry-times", _RETRIES, reference.skopeo_name)
    try:
        done = subprocess.run(
            [*_limited_program(most), *argv], timeout=_INSPECT_TIME,
            capture_output=True, stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise HostFault(
            f"the registry of {_printable_reference(reference)} does not answer"
        ) from None
    if done.returncode:
        raise _error(reference, done.stderr, Path())
    if not 0 < len(done.stdout) <= MAX_MANIFEST:
        raise Refused(
            f"has a manifest of {len(done.stdout)} bytes",
            limit=str(MAX_MANIFEST),
            **_subject(reference),
        )
    return done.stdout


def copy(reference: Reference, layout: Path, arch: str, most: int) -> None:
    """Copy an image to a new or incomplete OCI layout. Existing layers are not copied again.

    The layers may have ``most`` bytes together. No file that skopeo writes is larger than the sum
    of the sizes in the manifest. Shows skopeo's progress on a terminal. Raises Refused, HostFault.
    """
    reference, most = _choose_manifest(reference, arch, most)
    out, target = sys.stderr if sys.stderr.isatty() else subprocess.DEVNULL, f"oci:{layout}:image"
    options = ("--retry-times", _RETRIES, "--dest-oci-accept-uncompressed-layers")
    done = subprocess.run(
        [*_limited_program(most), "copy", *options, reference.skopeo_name, target],
        stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.PIPE, check=False,
    )  # fmt: skip
    if done.returncode:
        raise _error(reference, done.stderr, layout.parent)


def _choose_manifest(reference: Reference, arch: str, most: int) -> tuple[Reference, int]:
    """Return the reference of the image for ``arch``, and the maximum size of its files in bytes.

    The maximum is the sum of the sizes in the image's manifest. If a file or directory contains an
    index (a list of images), skopeo chooses the image itself, and the maximum is ``most``. Raises
    Refused, HostFault.
    """
    kind = ""
    for _ in range(MAX_DEPTH):
        data = manifest(reference, most)
        if reference.digest not in ("", f"sha256:{digest_of(data)}"):
            raise Refused("has a manifest with a different digest", **_subject(reference))
        try:
            what, *found = texts_of(documents.parse_manifest, data, kind, arch)
        except Refused as error:
            why, several, _ = str(error).partition(": choose one")
            raise Refused(
                why, **_subject(reference), fix="write NAME@DIGEST" if several else None
            ) from None
        if what == documents.MANIFEST:
            sizes = found[1::2]
            if not all(size.isdecimal() for size in sizes):
                raise Refused("has a manifest without sizes of layers", **_subject(reference))
            if (total := sum(map(int, sizes))) > most:
                limit, where = f"{most >> 20} MiB", "twice [plugin.own-images] max_size"
                raise Refused(
                    f"has layers of {total >> 20} MiB",
                    limit=limit,
                    where=where,
                    **_subject(reference),
                )
            return reference, total
        if reference.kind != "docker":
            return reference, most
        digest, _, kind, _ = found
        reference = reference.with_digest(digest.removeprefix("sha256:"))
    raise Refused("contains too deeply nested indexes", **_subject(reference))


def _limited_program(most: int) -> list[str]:
    # A registry can let skopeo wait for ever. Without the guard, skopeo would outlive this process.
    return guard_command("prlimit", f"--fsize={most + MAX_MANIFEST}", "--core=0", "--", program())


def program() -> str:
    """Return the path of skopeo. Raises HostFault with the name of its package."""
    found = shutil.which(PROGRAM)
    if found is None:
        raise HostFault(
            f"-vm {IMG.key}= needs {PROGRAM}, which is not installed on this host: "
            "ask the administrator to install the package skopeo"
        )
    return found


def digest_of(data: bytes) -> str:
    """Return the SHA-256 of a manifest in hexadecimal, which is the digest of its image."""
    return hashlib.sha256(data).hexdigest()


def full_disk_error(place: Path) -> Refused:
    """Return the error for a full disk or an exhausted quota."""
    fix = "free space, or remove images (vmgr images list --mine, vmgr images remove NAME)"
    return Refused(f"{place}: the disk is full or your quota is used up", fix=fix)


def _error(reference: Reference, output: bytes, place: Path) -> HostFault | Refused:
    words = output.decode("utf-8", "replace").strip()
    last = printable(words.rpartition("\n")[2], 500)
    lower = words.lower()
    if any(word in lower for word in FULL):
        return full_disk_error(place)
    if _TOO_LARGE in lower:
        why = "has a file that is larger than the manifest or the setting max_size permits"
        return Refused(f"{why} (skopeo: {last})", **_subject(reference))
    for signs, why, fix in _PERMANENT:
        if any(sign in lower for sign in signs):
            return Refused(f"{why} (skopeo: {last})", **_subject(reference), fix=fix)
    return HostFault(f"{_printable_reference(reference)} could not be copied (skopeo: {last})")


def _subject(reference: Reference) -> dict[str, str]:
    return {"key": IMG.key, "value": reference.written}


def _printable_reference(reference: Reference) -> str:
    return printable(reference.written, 200)
