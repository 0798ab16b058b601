"""Measure the image pool: a list of 2,000 images, and a large empty disk."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from figures import Figure, compare
from measures import Bench

from vtorque_core.api.image_builder import BuiltImage
from vtorque_core.images.sidecar import SIDECAR, FileRecord, Sidecar

COUNT = 2000
DATA = 64 << 20  # bytes in each disk
LARGE = 20 * 10**9
_FILES = {"disk": "disk.qcow2", "kernel": "vmlinuz", "initrd": "initrd"}
_FACTS = ("--guest-type", "linux", "--distro", "bench", "--arch", "x86_64", "--format", "raw")


def images(bench: Bench) -> list[Figure]:
    """Measure CPU of ``vmgr images list`` and ``vmgr images add``, each as a process."""
    many, pool = bench.scratch / "many", bench.scratch / "pool"
    fill(many, COUNT)
    pool.mkdir(mode=0o755)
    listed = [_vmgr(bench, many, "list") for _ in range(9)]
    small, large = disk(bench.scratch / "small", DATA), disk(bench.scratch / "large", LARGE)
    ours, base = [], []
    for _ in range(5):
        base.append(_add(bench, pool, small))
        ours.append(_add(bench, pool, large))
    middle = sorted(listed)[len(listed) // 2]
    return [
        Figure(f"vmgr images list, {COUNT} images, CPU", "s", middle, None, 0.3, {"ours": listed}),
        compare("vmgr images add, 20 GB with 64 MiB of data, CPU (64 MiB)", "s", ours, base, 1.3),
    ]


def fill(pool: Path, count: int) -> None:
    """Create images of three small files each."""
    pool.mkdir(mode=0o755)
    built = BuiltImage("linux", "bench", "x86_64", 256, labels={"init": "cloud-init"}, **_FILES)  # type: ignore[arg-type]
    for number in range(count):
        name = f"image-{number:04}"
        home = pool / name / "v0"
        home.mkdir(mode=0o755, parents=True)
        for file in _FILES.values():
            (home / file).write_bytes(b"x")
            (home / file).chmod(0o644)
        records = {f: FileRecord.from_status("0" * 64, (home / f).lstat()) for f in _FILES.values()}
        when = "2025-01-01T00:00:00+00:00"
        sidecar = Sidecar(name, built, "v0", "bench", when, records)
        (pool / name / SIDECAR).write_text(json.dumps(sidecar.as_json(), indent=2))


def disk(path: Path, size: int) -> Path:
    """Create a sparse raw disk with DATA random bytes in two parts."""
    with path.open("wb") as file:
        file.truncate(size)
        for at in (1 << 20, size - DATA // 2):
            file.seek(at)
            file.write(os.urandom(DATA // 2))
        file.truncate(size)
    return path


def _add(bench: Bench, pool: Path, file: Path) -> float:
    used = _vmgr(bench, pool, "add", str(file), "m", *_FACTS)
    _vmgr(bench, pool, "remove", "m")
    return used


def _vmgr(bench: Bench, pool: Path, *words: str) -> float:
    """Return the CPU seconds of a command and its child processes."""
    config = bench.scratch / "images.toml"
    top = bench.scratch
    config.write_text(
        f'[images]\npool = "{pool}"\nkeep = 0\n[paths]\nstate = "{top}/s"\nrun = "{top}/r"\n'
    )
    program = str(Path(sys.executable).with_name("vmgr"))
    return _cpu([program, "--config", str(config), "images", *words])


def _cpu(argv: Sequence[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(argv, check=True, capture_output=True, timeout=120)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
