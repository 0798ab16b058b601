"""Measure many small files in a share, against virtiofsd without vTorque's restrictions."""

from __future__ import annotations

import time

import bare
from figures import Figure, compare
from measures import Bench
from node import USER

FILES = 1000
_STALE = 1.5  # seconds: longer than the guest's kernel caches attributes of a file
# One process of busybox each, so that the guest does little else.
_STEPS = {
    "made": f"mkdir many && cd many && seq {FILES} | xargs touch",
    "looked at": "find many -size +1",
    "removed": "rm -r many",
}


def share(bench: Bench) -> list[Figure]:
    """Create, list and remove files in the home, in a bare QEMU with either daemon."""
    guests = bare.capture(bench.node, bench.scratch, "-vm", "img=micro,ram=512M,vcpus=1")
    rates: dict[tuple[str, bool], list[float]] = {}
    for _ in range(max(3, bench.rounds // 2)):
        for ours in (True, False):
            with bare.booted(guests, bench.scratch, confined=ours) as running:
                session = running[0].session()
                for name, program in _STEPS.items():
                    time.sleep(_STALE)
                    text = f"#!/bin/sh\nset -e\ncd /home/{USER}\n{program}\necho over\n"
                    run = bare.timed_run(session, bare.script(text.encode()))
                    spent = (run.ended - run.began) / FILES * 1000
                    rates.setdefault((name, ours), []).append(spent)
    return [
        compare(
            f"a file {name} in a share (bare virtiofsd)",
            "ms",
            rates[name, True],
            rates[name, False],
            1.2,
        )
        for name in _STEPS
    ]
