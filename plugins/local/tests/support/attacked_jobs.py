"""Time another user's jobs during each attack on the batch system, and without an attack.

    attacked_jobs.py ROUNDS

As root, in a separate machine (scripts/machine), which is discarded with all leftovers of attacks.
For the bench: prints ``{attack: {"attacked": [seconds...], "waited": [...], "quiet": [...]}}``;
``waited`` is the part of the first that had passed when the job's prologue began.
"""

import contextlib
import functools
import io
import json
import sys
import time

import local_attacks as of
from local_site import LocalSite, fresh_site

ATTACKS = {
    "a process whose memory waits for FUSE": of.unreadable_process,
    "1,000 connections with FUSE descriptors": of.unclosable_descriptors,
    "6 messages of 8 MiB that need much memory": of.unfolding_messages,
    "a canceled job that opens a FUSE file": of.unopenable_output,
    "9 jobs queued with 7 MiB each": of.full_of_environments,
    "9 jobs queued with 7 MiB each, and more are submitted": functools.partial(
        of.full_of_environments, more=True
    ),
    "40 jobs queued": of.flood_of_jobs,
}
JOBS = 3  # consecutive


def job(site: LocalSite) -> tuple[float, float]:
    """Return the seconds from a submission until its prologue, and until its end is reported."""
    script = site.script("#!/bin/sh\nexit 3\n")
    clock, begun = time.time(), time.monotonic()
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert site.submit("-W", "block=true", script) == 3
    seconds = time.monotonic() - begun
    prologue = site.root / f"prologue.{said.getvalue().split()[0]}"
    return prologue.stat().st_mtime - clock, seconds


def measure(rounds: int) -> dict[str, dict[str, list[float]]]:
    """Measure alternately: a site without an attack, then the same site during the attack."""
    times = {name: {"attacked": [], "waited": [], "quiet": []} for name in ATTACKS}
    for _ in range(rounds):
        for name, attack in ATTACKS.items():
            with fresh_site() as site:
                site.root.chmod(0o755)
                job(site)  # only the first job waits for this
                times[name]["quiet"] += [job(site)[1] for _ in range(JOBS)]
                with attack(site) as is_active:
                    for _ in range(JOBS):
                        waited, seconds = job(site)
                        if not is_active():  # the attack ended before the job
                            break
                        times[name]["waited"].append(waited)
                        times[name]["attacked"].append(seconds)
    return times


if __name__ == "__main__":
    with contextlib.redirect_stdout(io.StringIO()):  # the ids of an attack's jobs
        measured = measure(int(sys.argv[1]))
    json.dump(measured, sys.stdout)
