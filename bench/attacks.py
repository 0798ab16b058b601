"""Measure how much attacks by one user delay the jobs of another user.

Attacks on the batch system ``local`` use the sites of its tests (plugins/local/tests/support). The
attack on libvirtd uses real jobs. All attacking processes end with the benchmark, even if it is
killed.
"""

from __future__ import annotations

import json
import os
import pwd
import statistics
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from figures import Figure, compare
from measures import Bench
from node import BenchNode, measured, wait
from watching import REPO, TESTS

from vtorque_core.base.locks import lock_holder

LIMIT = 2.0  # times the quiet time
USER = "vtbench2"  # attacks
GUEST = ("-vm", "img=micro,ram=256M,vcpus=1")  # two have room on two cores
POLL = 0.05  # seconds; a start takes longer than the daemon's handshake, for which QEMU waits
_DIES = ("/usr/bin/setpriv", "--pdeathsig", "KILL", "--")


def attacks(bench: Bench) -> list[Figure]:
    """Measure a job from submission to the report of its end, with and without attacks."""
    rounds = max(3, bench.rounds // 3)
    return [*_on_local(bench.node, rounds), *_on_libvirtd(bench.node, rounds)]


def _on_local(node: BenchNode, rounds: int) -> list[Figure]:
    """Run empty bare-metal jobs with the node's code, in a simulated machine of namespaces."""
    library = next(TESTS.parents[1].glob("lib/*/site-packages"))  # pytest is not in a node's prefix
    support = [REPO / "plugins/local/tests/support", REPO / "tests/support"]
    python = node.prefix / "bin/python3"
    done = subprocess.run(
        [*_DIES, REPO / "scripts/machine", python, support[0] / "attacked_jobs.py", str(rounds)],
        env={"PATH": os.environ["PATH"], "PYTHONPATH": ":".join(map(str, [*support, library]))},
        stdout=subprocess.PIPE,
        timeout=300 + 60 * rounds,
        check=True,
    )
    figures = []
    for name, took in json.loads(done.stdout).items():
        if not took["attacked"]:
            raise RuntimeError(f"{name.strip()}: the attack did not last until a job's end")
        ours, quiet, waited = (
            [seconds * 1000 for seconds in took[key]] for key in ("attacked", "quiet", "waited")
        )
        figures.append(
            compare(f"job during the attack {name} (no attack)", "ms", ours, quiet, LIMIT)
        )
        if statistics.median(waited) > statistics.median(ours) / 4:
            figures.append(compare("  of that, waiting for one of two slots", "ms", waited))
    return figures


def _on_libvirtd(node: BenchNode, rounds: int) -> list[Figure]:
    """Run jobs in a guest while another user stops (SIGSTOP) the virtiofsd of their home."""
    ours, base = [], []
    with _at_the_same_time(node), measured(node.name, USER) as other:
        for _ in range(rounds):
            base.append(_whole_job(node))
            with _stopping(other):
                ours.append(_whole_job(node))
    return [compare("job in a guest during stopped virtiofsds (no attack)", "s", ours, base, LIMIT)]


def _whole_job(node: BenchNode) -> float:
    argv = ["vsub", "-W", "block=true", "-N", "b", "-o", "out", "-e", "err"]
    script = node.script("#!/bin/sh\nexit 3\n")
    begun = time.monotonic()
    done = node.run([*argv, *GUEST, script])
    if done.code != 3:
        raise RuntimeError(f"exit code {done.code}: {(node.home / 'err').read_text()}")
    return time.monotonic() - begun


@contextmanager
def _at_the_same_time(node: BenchNode) -> Iterator[None]:
    """Let the node run jobs of two users at once; otherwise each waits for the other."""
    own = node.config.read_text()
    local = [str(node.prefix / "bin/vtorque"), "local"]
    config = ["--config", str(node.config)]

    def restart(text: str, *options: str) -> None:
        subprocess.run([*local, "stop", *config], check=True, timeout=120)
        node.config.write_text(text)
        subprocess.run([*local, "serve", *config, *options], check=True, timeout=120)

    with ExitStack() as after:
        after.callback(restart, own)
        restart(f"{own}\n[node]\nexclusive = false\n", "--slots", "2")
        yield


@contextmanager
def _stopping(other: BenchNode) -> Iterator[None]:
    """Run jobs of a user one by one, and stop the virtiofsd of each.

    The context is entered at the first stopped virtiofsd. One of two slots stays free.
    """
    over = threading.Event()
    stopped: set[int] = set()
    script = other.script("#!/bin/sh\n")
    argv = ["vsub", "-W", "block=true", "-N", "held", "-o", "/dev/null", "-e", "/dev/null", *GUEST]

    def run() -> None:
        while not over.is_set():
            other.run([*argv, script])

    def stop() -> None:
        while not over.wait(POLL):
            stopped.update(pid for pid in _daemons(other) if _stop(other, pid))

    threads = [threading.Thread(target=each, daemon=True) for each in (run, stop)]
    for thread in threads:
        thread.start()
    try:
        wait(lambda: any(map(_is_stopped, tuple(stopped))), "a stopped virtiofsd")
        yield
    finally:
        over.set()
        if jobs := [job["id"] for job in other.jobs()]:
            other.run(["vmgr", "cancel", *jobs])
        for thread in threads:
            thread.join()
        wait(other.idle, f"the end of the jobs of {USER}")


def _daemons(node: BenchNode) -> Iterator[int]:
    """Yield the pids of all jobs' share daemons, found by their locks."""
    for path in (node.paths.run / "jobs").glob("*/g*/fs-*.lock"):
        with suppress(OSError):  # it has ended
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
            try:
                if pid := lock_holder(descriptor):
                    yield pid
            finally:
                os.close(descriptor)


def _stop(other: BenchNode, pid: int) -> bool:
    """Stop a process as the user, whose privileges suffice only for their own; return success."""
    user = pwd.getpwnam(other.user)
    done = subprocess.run(
        ["/bin/kill", "-STOP", str(pid)], user=user.pw_uid, group=user.pw_gid, extra_groups=[],
        check=False, capture_output=True, timeout=60,
    )  # fmt: skip
    return done.returncode == 0


def _is_stopped(pid: int) -> bool:
    """Return True if the process is stopped: state T in proc_pid_stat(5)."""
    with suppress(OSError):  # it has been ended
        stat = Path(f"/proc/{pid}/stat").read_bytes()
        return stat.rpartition(b")")[2].split()[0] == b"T"
    return False
