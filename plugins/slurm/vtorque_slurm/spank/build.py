"""Compile the SPANK plugin against the headers of the installed Slurm."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from vtorque_core.api import HostFault

SOURCE = Path(__file__).with_name("plugin.c")
FLAGS = ("-std=c11", "-Wall", "-Wextra", "-Werror", "-O2", "-fPIC", "-shared", "-s")
"""Compiler flags, for a reproducible build."""

_LAZY = ("-Wl,-z,lazy", "-Wl,--build-id=none")
_BUILT_FOR = re.compile(rb"vtorque-spank for Slurm (0x[0-9a-f]{6})\0")


def build(cc: str = "gcc") -> bytes:
    """Return the compiled plugin. Raises HostFault with the compiler's output."""
    found = shutil.which(cc)
    if found is None:
        raise HostFault(f"the compiler {cc} for the SPANK plugin is missing: install gcc")
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch, "plugin.so")
        done = subprocess.run(
            [found, *FLAGS, *_LAZY, "-o", str(out), SOURCE.name],
            cwd=SOURCE.parent,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        if done.returncode == 0:
            return out.read_bytes()
    if "slurm/" in done.stderr and "No such file" in done.stderr:
        raise HostFault(
            "Slurm's header slurm/spank.h is missing: install libslurm-dev (Debian) or slurm-devel "
            "of the release that runs here, or set [plugin.slurm] spank = false"
        )
    raise HostFault(f"{cc} could not compile the SPANK plugin: {done.stderr[-2000:]}")


def release(plugin: bytes) -> str:
    """Return the Slurm release that a plugin was built for, such as ``22.05``; empty if unknown."""
    found = _BUILT_FOR.search(plugin)
    if found is None:
        return ""
    number = int(found[1], 16)
    return f"{number >> 16 & 255}.{number >> 8 & 255:02}"
