"""Check which jobs this node can save, and find the program versions that a restore requires."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from vtorque_core.api import Refused, run_tool
from vtorque_core.live.jobs import RunningJob
from vtorque_survive import saving

_MODEL = "model "


def require_saveable(job: RunningJob, *, ends: bool) -> None:
    """Raise Refused if this node cannot save the job. ``ends``: the save will end the job."""
    facts = job.kept.facts()
    lacking = facts.get("unsaveable")
    if lacking is None:
        raise Refused("the job was started by a version of vTorque that cannot save jobs")
    if lacking:
        raise Refused(
            "the job's guests use resources that cannot be saved on this node: "
            f"{', '.join(lacking)}"
        )
    if len(job.guests) < len(facts.get("guests", ())):
        raise Refused(
            "some of the job's guests have migrated to another node: the job can no longer be saved"
        )
    if not ends and any(saving.has_user_disk(guest.run_dir) for guest in job.guests):
        raise Refused(
            "a job with disk= can only be saved with --stop: otherwise the job would continue and "
            "change its disk file"
        )


def disks(run_dirs: Iterable[Path]) -> dict[str, list[int]]:
    """Return inode number, size and modification time (ns) of the users' disk files.

    The keys are guest and file name. Errors: see :func:`saving.user_disks`.
    """
    return {
        f"{run_dir.name}/{name}": [file.st_ino, file.st_size, file.st_mtime_ns]
        for run_dir in run_dirs
        for name, file in saving.user_disks(run_dir).items()
    }


def is_whole(file: Path) -> bool:
    """Return whether libvirt has completed a file with a guest's memory (qemu_saveimage.h)."""
    try:
        with file.open("rb") as saved:
            return saved.read(16) == b"LibvirtQemudSave"
    except FileNotFoundError:
        return False


def tools(cpu: str = "") -> Mapping[str, str]:
    """Return the versions of vTorque, QEMU, libvirt and the processor, which a restore compares.

    The entry ``processor`` is the node's processor or, if set, libvirt's CPU model ``cpu``.
    """
    from importlib import metadata  # noqa: PLC0415 - a reader of mail, and each job's start waits

    return {
        "vtorque-core": metadata.version("vtorque-core"),
        "vtorque-survive": metadata.version("vtorque-survive"),
        "QEMU": _version(f"qemu-system-{os.uname().machine}"),
        "libvirt": _version("libvirtd"),
        "processor": f"{_MODEL}{cpu}" if cpu else _processor(),
    }


def cpu_model(tools: Mapping[str, str]) -> str:
    """Return the CPU model from a result of :func:`tools`, or "" for the node's processor."""
    name = tools.get("processor", "")
    return name.removeprefix(_MODEL) if name.startswith(_MODEL) else ""


def _version(program: str) -> str:
    said = run_tool(program, "--version", timeout=10)
    found = re.search(r"\d+(\.\d+)+", said)
    return found[0] if found else said.strip()


def _processor() -> str:
    """Return the CPU model name and a hash of its features (proc_cpuinfo(5))."""
    found: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        key, _, value = line.partition(":")
        found.setdefault(key.strip(), value.strip())
    able = found.get("flags") or found.get("Features") or ""
    return f"{found.get('model name', '')} {hashlib.sha256(able.encode()).hexdigest()[:12]}".strip()
