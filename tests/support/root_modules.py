"""Print the modules, one per line, that root loads to start a Slurm job with Linux guests."""

import sys
from importlib import import_module

import importlib_metadata

PLUGINS = ("slurm", "linux-guest")
# Imported by root at any start of such a job, but not by the modules above.
LATE = (
    "vtorque_core.node.start.boot",
    "vtorque_core.node.start.guest_resources",
    "vtorque_core.node.start.prologue",
    "vtorque_core.node.start.spare",
    "vtorque_linux_guest.boot.hardware",
    "vtorque_linux_guest.boot.seed_contents",
    "vtorque_linux_guest.job.driver",
    "vtorque_linux_guest.job.readiness",
    "vtorque_slurm.node",
)

if __name__ == "__main__":
    import_module("vtorque_core.cli.hook")
    for group in ("vtorque1", "vtorque1.node"):
        for point in importlib_metadata.entry_points(group=group):
            if point.name in PLUGINS:
                point.load()
    for name in LATE:
        import_module(name)
    found = (module for module in sys.modules if module.startswith("vtorque_"))
    sys.stdout.write("".join(f"{name}\n" for name in sorted(found)))
