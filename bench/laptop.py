"""Compare a user's own site, without root, with the node."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from figures import Figure, compare
from measures import Bench
from node import BenchNode

USER = "vtbenchown"
JOB = ("-W", "block=true", "-N", "b", "-j", "oe", "-o", "out", "-vm", "img=micro,ram=256M,vcpus=1")


@dataclass(frozen=True)
class Own(BenchNode):
    """The site of a user with an empty home, with the node's code (doc/laptop.md)."""

    user: str = USER

    @property
    def config(self) -> Path:
        """Path with which commands select the user's site; the file may be missing."""
        return self.home / ".config/vtorque/vtorque.toml"


def laptop(bench: Bench) -> list[Figure]:
    """Measure an empty job from ``vsub -W block=true`` to its end."""
    with _own(bench.node.name) as own:
        first = _seconds(own)  # makes the image, and starts the service
        _seconds(bench.node)
        ours, base = [], []
        for _ in range(bench.rounds):
            ours.append(_seconds(own))
            base.append(_seconds(bench.node))
    name = "a job without root: vsub to its end (the node's)"
    return [
        compare(name, "s", ours, base, 1.2),
        compare("  the first job, which builds the image", "s", [first]),
    ]


def _seconds(node: BenchNode) -> float:
    script = node.script("#!/bin/sh\ntrue\n")
    began = time.monotonic()
    done = node.run(["vsub", *JOB, script])
    if done.code:
        raise RuntimeError(f"vsub: exit code {done.code}: {(node.home / 'out').read_text()}")
    return time.monotonic() - began


@contextmanager
def _own(name: str) -> Iterator[Own]:
    subprocess.run(["useradd", "-m", "-s", "/bin/bash", USER], check=True)
    own = Own(name)
    uid = own.home.stat().st_uid
    try:
        yield own
        own.run(["vtorque", "local", "stop", "--config", str(own.config)])
    finally:
        subprocess.run(["pkill", "-KILL", "-U", str(uid)], check=False)  # its libvirtd
        subprocess.run(["userdel", "-f", "-r", USER], check=True, capture_output=True)
        shutil.rmtree(f"/tmp/vtorque-{uid}", ignore_errors=True)
