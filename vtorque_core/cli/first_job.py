"""Prepare a personal site for a job: directories, image, warning about emulation."""

from __future__ import annotations

import subprocess
import sys

from vtorque_core.base import kvm
from vtorque_core.base.errors import HostFault
from vtorque_core.base.locks import take_lock
from vtorque_core.config import directories
from vtorque_core.config.site_config import Site

IMAGES = ("micro", "own")
"""Images that a personal site builds at the first use, each with the builder of its name."""
_BUILD_TIME = 900.0  # seconds to wait for another job's build


def prepare(site: Site, image: str | None) -> None:
    directories.make_missing(site)
    chosen = kvm.choose(site.node.accel, site.paths.run, site.node.qemu_user)
    if chosen.warning:
        sys.stderr.write(f"vsub: warning: {chosen.warning}\n")
    if image in IMAGES and not (site.images.pool / image).exists():
        _build(site, image)


def _build(site: Site, image: str) -> None:
    lock = take_lock(site.paths.run / "locks" / "first-image", _BUILD_TIME)  # until exit
    if (site.images.pool / image).exists():
        return
    sys.stderr.write(f"vsub: building the image {image}, once: about ten seconds\n")
    argv = [sys.executable, "-I", "-m", "vtorque_core.cli.vmgr", "--config", str(site.path)]
    made = subprocess.run(
        [*argv, "images", "build", image, image], stdin=subprocess.DEVNULL, stdout=2, check=False,
        pass_fds=(lock,),
    )  # fmt: skip
    if made.returncode:
        raise HostFault(f"the image {image} could not be built: run vtorque doctor")
