"""Debian image for tests, with all of Debian's drivers and the RDMA programs."""

from pathlib import Path

IMAGE = "debian-rdma"
PACKAGES = "rdma-core,ibverbs-providers,ibverbs-utils"


def ensure(node):
    """Build it if it is not in the node's pool, 2 minutes; return its directory."""
    if node.root("vmgr", "images", "show", IMAGE, check=False).returncode:
        options = ("-o", "kernel=generic", "-o", f"packages={PACKAGES}")
        node.root("vmgr", "images", "build", IMAGE, "debian", *options, timeout=900)
    (disk,) = Path(node.state, "images", IMAGE).glob("*/root.qcow2")
    return disk.parent
