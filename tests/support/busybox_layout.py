"""An OCI layout whose image has only busybox, for jobs in users' own images."""

import shutil
from pathlib import Path

from oci_images import as_directory, layer, layout_files
from users import run

APPLETS = (
    "sh", "id", "cat", "mkdir", "ls", "grep", "cut", "touch", "chown", "mknod", "chmod", "stat",
    "nc", "ip", "ping", "sleep", "hostname", "arping", "mount", "dd", "su", "mv",
)  # fmt: skip


def busybox_layout(place, owner, **programs):
    """Write the layout to ``place``, which belongs to ``owner`` afterwards; return the place.

    ``programs`` are contents of further files in ``/bin``.
    """
    busybox = Path(shutil.which("busybox")).read_bytes()
    entries = [("bin/", "", "d"), ("bin/busybox", busybox, "f"), ("etc/", "", "d")]
    entries += [(f"bin/{name}", "busybox", "l") for name in APPLETS]
    entries += [(f"bin/{name}", content, "f") for name, content in programs.items()]
    entries += [("lib", "usr/lib", "l"), ("etc/os-release", b"ID=mine\n", "f")]
    entries += [("etc/passwd", b"nobody:x:65534:65534::/:/bin/sh\n", "f")]
    as_directory(layout_files([layer(*entries)], Env=["GREETING=hello"]), place)
    run("chown", "-R", owner if ":" in owner else f"{owner}:", place)
    return place
