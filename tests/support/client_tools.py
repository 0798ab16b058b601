"""Tools that submit jobs, installed from PyPI for a user of the Slurm cluster.

They use a Python in the user's home, as users install it. Guests find that Python there, so the
image needs none.
"""

import fcntl
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import slurm_cluster as slurm

REPO = Path(__file__).resolve().parents[2]
PINS = REPO / "tests/data/clients.txt"
QUICK = """
submitit cloudpickle typing_extensions dask distributed dask-jobqueue click fsspec packaging partd
PyYAML toolz importlib_metadata zipp Jinja2 MarkupSafe locket msgpack psutil sortedcontainers tblib
tornado urllib3 zict lazy-importer
"""
HOME = f"/home/{slurm.USER}"
PYTHON = f"{HOME}/python/bin/python3"
SUBMIT_HOST = "10.89.0.2"
TIMEOUTS = ("sacct", "-Xns", "TIMEOUT", "-S", "now-1days", "-E", "now", "-o", "JobID")
# Of wheels' own libraries, and of sys.executable, which the loader's name would replace.
LIBRARIES = (
    "libgcc_s.so.1", "libstdc++.so.6", "librt.so.1", "libpthread.so.0", "libdl.so.2",
    "libutil.so.1",
)  # fmt: skip
START = f"""#!/bin/sh
export PYTHONHOME={HOME}/python
exec $PYTHONHOME/lib/ld.so --argv0 "$0" --library-path $PYTHONHOME/lib $PYTHONHOME/lib/python "$@"
"""


def copy_python(top):
    """Copy Debian's Python with all its libraries: it runs in a guest without any of them."""
    name = f"python3.{sys.version_info.minor}"
    standard, lib = Path("/usr/lib", name), top / "lib"
    unwanted = shutil.ignore_patterns("test", "idlelib", "config-*", "sitecustomize.py")
    shutil.copytree(standard, lib / name, ignore=unwanted, ignore_dangling_symlinks=True)
    program = Path("/usr/bin", name)
    shutil.copy(program, lib / "python")
    argv = ["ldd", program, *standard.glob("lib-dynload/*.so")]
    found = subprocess.run(argv, capture_output=True, text=True, check=True).stdout
    libraries = {Path(path) for path in re.findall(r"(/\S+) \(0x", found)}
    (where,) = {path.parent for path in libraries if path.name == "libc.so.6"}
    for path in libraries | {where / each for each in LIBRARIES}:
        shutil.copy(path, lib / path.name)
    next(lib.glob("ld-linux*")).rename(lib / "ld.so")
    (top / "bin").mkdir()
    (top / "bin/python3").write_text(START)
    (top / "bin/python3").chmod(0o755)


def install(names):
    """Install the pinned packages with these names, or all, once; return their directory."""
    pins = PINS.read_text()
    if names:
        rows, wanted = pins.splitlines(), names.split()
        pins = "\n".join(row for row in rows if row.partition("==")[0] in wanted)
    kept = REPO / (".venv/clients-quick" if names else ".venv/clients")
    with kept.with_suffix(".lock").open("w") as lock:  # other machines may need them, too
        fcntl.flock(lock, fcntl.LOCK_EX)
        _install(kept, pins)
    return kept


def _install(kept, pins):
    if not (kept / "pins").exists() or (kept / "pins").read_text() != pins:
        shutil.rmtree(kept, ignore_errors=True)
        kept.mkdir()
        (kept / "wanted").write_text(pins)
        pip = ["pip", "install", "-q", "--no-deps", "--target", kept, "-r", kept / "wanted"]
        # scripts/test may have set pip's constraints, which are those of vTorque.
        environ = {name: value for name, value in os.environ.items() if "CONSTRAINT" not in name}
        subprocess.run([sys.executable, "-m", *pip], check=True, timeout=900, env=environ)
        (kept / "wanted").rename(kept / "pins")


def rows_of(done):
    return [line.split() for line in done.stdout.decode().splitlines()]


def in_guest(name):
    return re.fullmatch(r"vn\d", name) is not None
