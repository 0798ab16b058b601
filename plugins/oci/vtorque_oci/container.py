"""What a container is made of, however it came: layers, and how its programs are to be started."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vtorque_core.api import Refused
from vtorque_oci.blobs import digest_of

MAX_JSON = 4 << 20  # bytes: what registries accept as a manifest (OCI distribution-spec 1.1)
MAX_LAYERS = 127  # as overlayfs and docker have it
_MAX_TEXT = 1 << 17  # bytes of one argument or variable: MAX_ARG_STRLEN of execve(2)
MAX_SETTINGS = 1 << 20  # bytes: CONTAINER_MAX of the agent's container.c
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "ppc64le": "ppc64le", "s390x": "s390x"}

# Who and where the job is: the batch system's to say, in a container as elsewhere.
_JOBS = {"HOME", "USER", "LOGNAME", "SHELL", "PWD", "OLDPWD", "TMPDIR", "TERM", "HOSTNAME"}
_JOBS_PREFIXES = ("PBS_", "SLURM_", "VTORQUE_")


@dataclass(frozen=True)
class Container:
    """``layers``: plain tar files, lowest first, with the sha256 that each must have, if known.

    ``environment``: what programs of the container expect; ``entrypoint`` and ``command``: its
    own program and the arguments that a user's replace.
    """

    layers: tuple[tuple[Path, str | None], ...]
    environment: Mapping[str, str]
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    title: str = ""


def parse_json(data: bytes, what: str) -> dict[str, Any]:
    """Return a JSON object. Raises Refused."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        raise Refused(f"{what} is not JSON") from None
    if type(found) is not dict:
        raise Refused(f"{what} is not a JSON object")
    return found


def of_config(
    config: Mapping[str, Any], layers: tuple[Path, ...], arch: str, title: str
) -> Container:
    """Return the container of an image configuration (OCI image-spec 1.1, config.md).

    ``arch``: the guests', as the kernel calls it. Raises Refused.
    """
    wanted = ARCHITECTURES.get(arch, arch)
    for key, value in (("architecture", wanted), ("os", "linux")):
        if config.get(key, value) != value:
            raise Refused(f"the container is for {key} {config[key]!r}; guests have {value}")
    rootfs = config.get("rootfs")
    found = rootfs.get("diff_ids") if type(rootfs) is dict else None
    if type(found) is not list or len(found) != len(layers):
        raise Refused("the configuration does not list the layers that the image has")
    digests = [digest_of(each) for each in found]
    inner = config.get("config") or {}
    if type(inner) is not dict:
        raise Refused("the configuration's config is not a JSON object")
    return Container(
        layers=tuple(zip(layers, digests, strict=True)),
        environment=environment(_texts(inner, "Env")),
        entrypoint=_texts(inner, "Entrypoint"),
        command=_texts(inner, "Cmd"),
        title=title,
    )


def _texts(table: Mapping[str, Any], key: str) -> tuple[str, ...]:
    value = table.get(key) or []
    if type(value) is not list or not all(type(t) is str for t in value):
        raise Refused(f"the configuration's {key} is not a list of texts")
    if any("\0" in t or not 0 <= _length(t) < _MAX_TEXT for t in value):
        raise Refused(f"the configuration's {key} has a text that no program can be given")
    return tuple(value)


def _length(text: str) -> int:
    """Return a text's bytes, or -1 if it has none: JSON can say half of a character."""
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        return -1


def environment(entries: tuple[str, ...]) -> dict[str, str]:
    """Return the variables of a container that a job is to have. Raises Refused."""
    found = {}
    for entry in entries:
        name, equals, value = entry.partition("=")
        if not equals or not _NAME.fullmatch(name):
            raise Refused(f"the configuration's Env has {entry[:100]!r}, which is no variable")
        if name not in _JOBS and not name.startswith(_JOBS_PREFIXES):
            found[name] = value
    return found


def settings(container: Container, prefix: tuple[str, ...]) -> bytes:
    """Return what the agent reads (agent/container.c): the environment, then what goes before.

    The job's own variables win but for PATH: that of the host means nothing in a container.
    """
    entries = [
        f"{'!' if name == 'PATH' else ''}{name}={value}"
        for name, value in sorted(container.environment.items())
    ]
    if any(not word for word in prefix):
        raise Refused("the container's entry point has an empty word")
    found = "".join(f"{text}\0" for text in (*entries, "", *prefix)).encode()
    if len(found) > MAX_SETTINGS:
        raise Refused(
            f"the container's environment and entry point have {len(found)} bytes; the agent takes "
            f"at most {MAX_SETTINGS}"
        )
    return found
