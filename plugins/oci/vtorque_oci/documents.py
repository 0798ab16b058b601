"""Parse the JSON documents of an image (OCI image-spec 1.1).

A hostile document may need much memory or time. Therefore each function runs in an unprivileged
process (:mod:`vtorque_core.api.unprivileged_parser`). ``document`` is a JSON file's descriptor.
Root gets the values that a function yields, and validates them. If a function raises Refused, root
gets the message.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from vtorque_core.api import Refused
from vtorque_oci.blobs import digest_of

MAX_JSON = 4 << 20  # bytes: what registries accept as a manifest (OCI distribution-spec 1.1)
MAX_LAYERS = 127  # the limit of overlayfs and docker
LAYER, VARIABLE, ENTRYPOINT, COMMAND = "L", "E", "P", "C"
"""The kinds of texts of :func:`parse_configuration`. A text's first character is its kind."""
INDEX, MANIFEST = "index", "manifest"
"""First value that :func:`parse_manifest` yields: the kind of the document."""

_INDEXES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
_MANIFESTS = (
    "application/vnd.oci.image.manifest.v1+json",
    "application/vnd.docker.distribution.manifest.v2+json",
)
_TITLE = "org.opencontainers.image.ref.name"
_MAX_TEXT = 1 << 17  # bytes of one argument or variable: MAX_ARG_STRLEN of execve(2)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "ppc64le": "ppc64le", "s390x": "s390x"}

# Variables that the batch system sets, in a container, too.
_JOBS = {"HOME", "USER", "LOGNAME", "SHELL", "PWD", "OLDPWD", "TMPDIR", "TERM", "HOSTNAME"}
_JOBS_PREFIXES = ("PBS_", "SLURM_", "VTORQUE_")


def parse_index(tag: str, arch: str, document: int) -> Iterator[bytes]:
    """Yield digest, size, media type and title of the image that ``index.json`` lists."""
    yield from _encode(*_choose(_object(document, "index.json"), tag, arch))


def parse_manifest(kind: str, arch: str, document: int) -> Iterator[bytes]:
    """Yield the contents of a manifest or index of the media type ``kind``.

    For an index, yield INDEX and the values of :func:`parse_index`. For a manifest, yield MANIFEST,
    then digest and size of the configuration and of each layer.
    """
    found = _object(document, "the manifest")
    kind = kind or str(found.get("mediaType", ""))
    if kind in _INDEXES or "manifests" in found:
        yield from _encode(INDEX, *_choose(found, "", arch))
        return
    if kind not in (*_MANIFESTS, ""):
        raise Refused(f"has a manifest of unknown type {kind[:100]!r}")
    listed = found.get("layers")
    if type(listed) is not list or not 0 < len(listed) <= MAX_LAYERS:
        raise Refused(f"the manifest has no layers, or more than {MAX_LAYERS}")
    blobs = [_blob(found.get("config")), *(_blob(each) for each in listed)]
    yield from _encode(MANIFEST, *(text for blob in blobs for text in blob))


def parse_saved(tag: str, document: int) -> Iterator[bytes]:
    """Yield one image's title (its first tag), configuration path and layer paths.

    ``document`` is the ``manifest.json`` of docker save. If it lists several images, ``tag``
    selects one; otherwise ``tag`` may be empty.
    """
    listed = _parse(document, "manifest.json")
    if type(listed) is not list or not all(type(each) is dict for each in listed):
        raise Refused("manifest.json is not a list of images")
    if tag:
        listed = [each for each in listed if tag in _tags(each)]
    if len(listed) != 1:
        raise Refused(f"contains {len(listed)} matching images: choose one with -o tag=NAME")
    paths, config = listed[0].get("Layers"), listed[0].get("Config")
    if type(paths) is not list or not 0 < len(paths) <= MAX_LAYERS or type(config) is not str:
        raise Refused("manifest.json lacks layers or a configuration")
    title = (_tags(listed[0]) or [""])[0]
    yield from _encode(title, config, *(str(path) for path in paths))


def parse_configuration(layers: int, arch: str, document: int) -> Iterator[bytes]:
    """Yield an image's layer digests, variables, entry point and command.

    Each value begins with LAYER, VARIABLE, ENTRYPOINT or COMMAND. ``document`` is the descriptor of
    the image's configuration. ``arch`` is the guests' architecture, such as ``x86_64``. ``layers``
    is the number of layers in the manifest. Raises Refused if the configuration has a different
    architecture or number of layers.
    """
    config = _object(document, "the configuration")
    wanted = _ARCHITECTURES.get(arch, arch)
    for key, value in (("architecture", wanted), ("os", "linux")):
        if config.get(key, value) != value:
            raise Refused(
                f"the container is built for {key} {config[key]!r}, but guests have {value}"
            )
    rootfs = config.get("rootfs")
    digests = rootfs.get("diff_ids") if type(rootfs) is dict else None
    if type(digests) is not list or len(digests) != layers:
        raise Refused(
            f"the image configuration does not list as many layers as the manifest ({layers})"
        )
    inner = config.get("config") or {}
    if type(inner) is not dict:
        raise Refused('the key "config" of the image configuration is not a JSON object')
    yield from _encode(*(f"{LAYER}sha256:{digest_of(each)}" for each in digests))
    yield from _encode(*(VARIABLE + each for each in _variables(_texts(inner, "Env"))))
    yield from _encode(*(ENTRYPOINT + each for each in _texts(inner, "Entrypoint")))
    yield from _encode(*(COMMAND + each for each in _texts(inner, "Cmd")))


def _encode(*texts: str) -> Iterator[bytes]:
    for text in texts:
        yield text.encode("utf-8", "replace")  # an unpaired surrogate becomes a question mark


def _parse(document: int, what: str) -> Any:
    try:
        return json.loads(os.pread(document, MAX_JSON, 0))
    except (ValueError, RecursionError):
        raise Refused(f"{what} is not JSON") from None


def _object(document: int, what: str) -> dict[str, Any]:
    found = _parse(document, what)
    if type(found) is not dict:
        raise Refused(f"{what} is not a JSON object")
    return found


def _choose(found: Mapping[str, Any], tag: str, arch: str) -> tuple[str, str, str, str]:
    """Return digest, size, media type and title of one image.

    If several images have the tag, exactly one of them must be for ``arch``.
    """
    listed = found.get("manifests")
    if type(listed) is not list or not all(type(d) is dict for d in listed):
        raise Refused("the index lists no manifests")
    if tag:
        listed = [d for d in listed if _title(d) == tag]
    wanted = _ARCHITECTURES.get(arch, arch)
    platforms = [(d, _table(d, "platform")) for d in listed]
    fitting = [
        d
        for d, platform in platforms
        if (platform.get("architecture"), platform.get("os", "linux")) == (wanted, "linux")
    ]
    images = listed if len(listed) == 1 else fitting
    if len(images) != 1:
        names = sorted(_title(d) for d in listed)
        shown = ", ".join(name for name in names if name) or "without names"
        raise Refused(
            f"contains {len(listed)} images ({shown[:300]}), {len(fitting)} of them for "
            f"{wanted}: choose one with -o tag=NAME"
        )
    return *_blob(images[0]), str(images[0].get("mediaType", "")), _title(images[0])


def _blob(described: Any) -> tuple[str, str]:
    """Return the digest and size in an OCI descriptor (descriptor.md); "" for a missing size."""
    if type(described) is not dict:
        raise Refused("a descriptor is not a JSON object")
    return f"sha256:{digest_of(described.get('digest'))}", str(described.get("size", ""))[:30]


def _table(described: Mapping[str, Any], key: str) -> dict[str, Any]:
    found = described.get(key)
    return found if type(found) is dict else {}


def _title(described: Mapping[str, Any]) -> str:
    return str(_table(described, "annotations").get(_TITLE, ""))[:1000]


def _tags(image: Mapping[str, Any]) -> list[str]:
    found = image.get("RepoTags")
    return [str(tag)[:1000] for tag in found] if type(found) is list else []


def _texts(table: Mapping[str, Any], key: str) -> list[str]:
    value = table.get(key) or []
    if type(value) is not list or not all(type(t) is str for t in value):
        raise Refused(f"the key {key} of the image configuration is not a list of strings")
    if any("\0" in t or not 0 <= _length(t) < _MAX_TEXT for t in value):
        raise Refused(
            f"the key {key} of the image configuration contains a string that cannot be "
            "passed to a program"
        )
    return list(value)


def _length(text: str) -> int:
    """Return the number of bytes of a text, or -1 for an unpaired surrogate of JSON."""
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        return -1


def _variables(entries: list[str]) -> Iterator[str]:
    for entry in entries:
        name, equals, _ = entry.partition("=")
        if not equals or not _NAME.fullmatch(name):
            raise Refused(
                f"the key Env of the image configuration has {entry[:100]!r}, not NAME=VALUE"
            )
        if name not in _JOBS and not name.startswith(_JOBS_PREFIXES):
            yield entry
