"""The ``vtorque doctor`` check of whether this node can suspend, save and migrate jobs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from vtorque_core.api import HostFault, VtorqueError, require_root_owned, run_tool
from vtorque_core.api.health import HealthResult, ok, warning
from vtorque_core.api.node_job import Site
from vtorque_core.live.node_setup import VIRTIOFSD
from vtorque_survive.settings import Settings
from vtorque_survive.shared_store import require_private

_OPTION = "--migration-verify-handles"
_QEMU = (8, 2)  # first version that saves vhost-user-fs (its changelog)
_LIBVIRT = (11, 3)  # oldest tested version that saves and migrates shared directories


def check(site: Site) -> Iterator[HealthResult]:
    """Report whether this node can suspend, save and migrate jobs."""
    yield ok("suspend, resume: supported")
    missing = "; ".join(filter(None, (_daemon(), _qemu(), _libvirt())))
    settings = site[Settings]
    why_not = "; ".join(filter(None, (_place(settings), missing)))
    if settings.checkpoints and why_not:
        fix = (
            "set [plugin.survive] checkpoints to empty, or fix this: until then jobs that "
            "request checkpoints are rejected"
        )
        yield warning(f"checkpoint: not supported: {why_not}", fix)
    else:
        yield ok(f"checkpoint: not supported: {why_not}" if why_not else "checkpoint: supported")
    why_not = missing if settings.remote_command else "[plugin.survive] remote_command is empty"
    yield ok(
        f"migrate: not supported: {why_not}"
        if why_not
        else "migrate: supported, if the batch system can"
    )


def _place(settings: Settings) -> str:
    """Return why the checkpoint directory is unusable, or an empty string."""
    if not settings.checkpoints:
        return "[plugin.survive] checkpoints is empty"
    try:
        require_root_owned(Path(settings.checkpoints), uid=os.geteuid())
        require_private(settings)
    except VtorqueError as error:
        return str(error)
    return ""


def _daemon() -> str:
    """Return why guests with shared directories cannot be saved, or an empty string."""
    try:
        helps = run_tool(VIRTIOFSD, "--help", timeout=10)
    except HostFault as error:
        return str(error)
    return "" if _OPTION in helps else f"{VIRTIOFSD} does not support {_OPTION}"


def _qemu() -> str:
    return _check_version(f"qemu-system-{os.uname().machine}", _QEMU, "needed")


def _libvirt() -> str:
    return _check_version("virsh", _LIBVIRT, "the oldest tested version")


def _check_version(program: str, least: tuple[int, int], why: str) -> str:
    try:
        said = run_tool(program, "--version", timeout=10)
    except HostFault as error:
        return str(error)
    found = re.search(r"(\d+)\.(\d+)", said)
    if found and (int(found[1]), int(found[2])) >= least:
        return ""
    version = found[0] if found else "unknown"
    return f"{program} {version} is too old: {least[0]}.{least[1]} is {why}"
