"""What a container is made of, however it came: layers, and how its programs are to be started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vtorque_core.api import Refused

MAX_SETTINGS = 1 << 20  # bytes: CONTAINER_MAX of the agent's container.c


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
