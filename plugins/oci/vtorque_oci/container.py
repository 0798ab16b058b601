"""A container from any source: its layers, and how to start its programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from vtorque_core.api import Refused

MAX_SETTINGS = 1 << 20  # bytes: CONTAINER_MAX of the agent's container.c


@dataclass(frozen=True)
class Container:
    """A container.

    Attributes:
        layers: plain tar files, lowest first, with their expected sha256, if known.
        environment: variables of the container's programs.
        entrypoint: the container's own program.
        command: default arguments of ``entrypoint``, which a user's arguments replace.
    """

    layers: tuple[tuple[Path, str | None], ...]
    environment: Mapping[str, str]
    entrypoint: tuple[str, ...] = ()
    command: tuple[str, ...] = ()
    title: str = ""


def settings(container: Container, prefix: tuple[str, ...]) -> bytes:
    """Return the agent's settings file (agent/container.c): environment, then ``prefix``.

    The agent puts the words ``prefix`` before the job's command. The job's variables override this
    environment, except for PATH, because the host's PATH is wrong in a container.
    """
    entries = [
        f"{'!' if name == 'PATH' else ''}{name}={value}"
        for name, value in sorted(container.environment.items())
    ]
    if any(not word for word in prefix):
        raise Refused("the container's entry point contains an empty word")
    found = "".join(f"{text}\0" for text in (*entries, "", *prefix)).encode()
    if len(found) > MAX_SETTINGS:
        raise Refused(
            f"the container's environment and entry point have {len(found)} bytes, and the "
            f"agent's limit is {MAX_SETTINGS}"
        )
    return found
