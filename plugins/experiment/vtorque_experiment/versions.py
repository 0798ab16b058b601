"""The software and hardware versions of an experiment, as known on the submit host.

A point's file ``machine`` has the kernel, host name and CPU model of its job.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from vtorque_core.api import VtorqueError, printable
from vtorque_core.live import images
from vtorque_experiment import files
from vtorque_experiment.definition import MAX_FILE

_TOOLS = {
    "qemu": ("/usr/bin/qemu-system-x86_64", "--version"),
    "libvirt": ("/usr/bin/virsh", "--version"),
}


def collect_versions(config: Path) -> Mapping[str, Any]:
    """Return software versions, image checksums, and this host's CPU model. Raises ConfigError."""
    site = images.site_of(config)
    ours = {
        str(found.metadata["Name"]): found.version
        for found in metadata.distributions()
        if str(found.metadata["Name"]).startswith("vtorque-")
    }
    return {
        "vtorque": dict(sorted(ours.items())),
        "batch_system": site.batch.system,
        "python": sys.version.split()[0],
        "host": {
            "name": platform.node(),
            "kernel": f"{platform.release()} {platform.version()}",
            "cpu": _cpu(),
            "cpus": os.cpu_count(),
        },
        **{name: _first_line(argv) for name, argv in _TOOLS.items()},
        "images": _images(site.images.pool),
    }


def note_end(config: Path, path: Path) -> None:
    """Save, as ``at_end`` in a versions file, the versions that changed during a run.

    Raises OSError, ConfigError.
    """
    begun = read(path)
    now = json.loads(json.dumps(collect_versions(config)))
    changed = {name: value for name, value in now.items() if value != begun.get(name)}
    if changed and changed != begun.get("at_end"):
        text = json.dumps(begun | {"at_end": changed}, indent=2) + "\n"
        files.write(path.parent, path.name, content=text.encode())


def read(path: Path) -> dict[str, Any]:
    """Return the content of a versions file; empty if the file is missing or damaged."""
    try:
        found = json.loads(files.read(path.parent, path.name, most=MAX_FILE))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _first_line(argv: tuple[str, ...]) -> str:
    try:
        done = subprocess.run(argv, capture_output=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return printable(done.stdout.decode("utf-8", "replace").partition("\n")[0], 200)


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
        if line.startswith("model name"):
            return printable(line.partition(":")[2].strip(), 200)
    return platform.machine()


def _images(pool: Path) -> Mapping[str, Any]:
    found = {}
    try:
        for name in images.names(pool):
            sidecar = images.read_sidecar(pool, name)
            found[name] = {file: record.sha256 for file, record in sidecar.files.items()}
    except (OSError, VtorqueError):
        return found
    return found
