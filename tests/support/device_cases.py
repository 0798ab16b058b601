"""Requests that enable each device plugin, on a recorded machine with all devices.

Every installed plugin that makes claims needs a case in this module, because the tests of all
plugins iterate over the cases.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vtorque_core.config.plugins import Plugins
from vtorque_passthrough.pci_functions import PciFunction
from vtorque_passthrough.vfio import DRIVER, Vfio
from vtorque_testing import recorded, sysfs_tree

CAPABILITIES = Path(__file__).parents[2] / "testing/vtorque_testing/machines"
MACHINE = (CAPABILITIES / "xeon-2x32-smt.xml").read_text()

# Stands for ip-link(8): a file for each setting of a virtual function.
_IP = """#!/bin/sh
case "$*" in
  "-json link show dev ibp94s0")
    printf '[{"vfinfo_list":['
    for vf in 0 1 2 3; do
      [ $vf = 0 ] || printf ,
      printf '{"vf":%s,"node guid":"00:00:00:00:00:00:00:00",' $vf
      printf '"port guid":"00:00:00:00:00:00:00:00","link_state":"disable"}'
    done
    echo ']}]' ;;
  "link set dev ibp94s0 vf "*)
    if [ "$8" = 00:00:00:00:00:00:00:00 ] || [ "$8" = disable ]; then
      rm -f "{top}/tables/vf$6-$7"
    else
      echo "$8" > "{top}/tables/vf$6-$7"
    fi ;;
  *) echo "what is ip $*?" >&2; exit 1 ;;
esac
"""
_GPU = {"name": "gpu", "ids": ["10de:20b0"]}


@dataclass(frozen=True)
class Case:
    """A request (``-vm`` keys) and the ``[plugin.<name>]`` tables that it needs."""

    pairs: Mapping[str, str]
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


CASES: dict[str, Case] = {
    "iocm": Case(
        {"iocm": "true", "iocm_max_cores": "2"},
        {"iocm": {"interval": "60s", "interfaces": ["ens5f0"]}},
    ),
    "passthrough": Case({"pci": "gpu:1"}, {"passthrough": {"classes": [_GPU]}}),
    "pinning": Case({"vcpu_pinning": "true", "numa": "strict", "hugepages": "2M"}),
    "scam": Case({"scam": "true"}),
    "unclot": Case({"unclot": "true", "unclot_shmem": "2M"}),
    "vrdma": Case(
        {"vrdma": "true"},
        {
            "vrdma": {
                "backends": [{"kind": "sriov"}],
                "cards": ["ibp94s0"],
                "allow_unfiltered": True,
            }
        },
    ),
}
MORE: dict[str, Case] = {"vrdma": Case({"vrdma": "true"})}
"""Another mode of a plugin: Soft-RoCE."""


# -vm key to values that a user may choose; None: not given. Prerequisites of values are in
# NEEDED.
VALUES: dict[str, tuple[str | None, ...]] = {
    "vcpus": ("1", "3", "4"),
    "ram": ("128M", "1G"),
    "vms_per_node": ("1", "2", "4"),
    "fs_type": (None, "ramdisk"),
    "vcpu_pinning": (None, "true", "FILE"),
    "hugepages": (None, "true", "2M"),
    "numa": (None, "preferred", "strict"),
    "iocm": (None, "true"),
    "iocm_min_cores": (None, "2"),
    "iocm_max_cores": (None, "2", "4"),
    "scam": (None, "true"),
    "unclot": (None, "true"),
    "unclot_shmem": (None, "1M", "64M"),
    "vrdma": (None, "true"),
    "pci": (None, "gpu:1"),
}
NEEDED = {"iocm_min_cores": "iocm", "iocm_max_cores": "iocm", "unclot_shmem": "unclot"}


def load(only: Iterable[str] | None = None) -> Plugins:
    """Return these plugins, by default all, and the guest type of Linux."""
    return recorded.load(None if only is None else {"linux-guest", *only})


ONLY_REFUSE = {"vtorque_guest_types", "vtorque_image_sources"}
"""Hooks of plugins whose vtorque_plan makes no claim."""


def devices(plugins: Plugins) -> list[str]:
    """Return the names of the plugins that require resources of a node for any type of guest."""
    hooks = {name: plugins.hooks_of(name) for name in plugins.names}
    return [
        name for name, has in hooks.items() if "vtorque_plan" in has and ONLY_REFUSE.isdisjoint(has)
    ]


DEVICES = devices(load())


def together(names: Iterable[str] = tuple(DEVICES)) -> Case:
    """Return one case of several plugins."""
    pairs = {"vcpus": "1", "ram": "1G"}  # fewer than the job has: the machine is large
    settings: dict[str, Mapping[str, Any]] = {}
    for name in names:
        pairs |= CASES[name].pairs
        settings |= CASES[name].settings
    return Case(pairs, settings)


def node(
    top: Path, plugins: Plugins, case: Case, machine: str = MACHINE, **options: Any
) -> recorded.RecordedNode:
    """Return the recorded machine below ``top``; ``options``: those of RecordedNode.make."""
    known = {name: table for name, table in case.settings.items() if name in plugins.names}
    values = {
        "tables": {"plugin": known, **options.pop("tables", {})},
        "sysfs": functools.partial(sysfs_tree.tree, "all-devices"),
        "tools": {"ip": _IP},
        "share": {"cpu_count": 24},
        **options,
    }
    made = recorded.RecordedNode.make(top, machine, plugins, **values)
    for number in ("41", "42"):  # the interrupts of all-devices; in their state after a release
        (top / "irq" / number).mkdir(parents=True)
        (top / "irq" / number / "smp_affinity_list").write_text("0-127")
    return dataclasses.replace(
        made,
        covers={**made.covers, Path("/proc/irq"): top / "irq"},
        doubles=tuple(_vfio(top / "sys")),
    )


def _vfio(sysfs: Path) -> Iterator[tuple[type, str, Callable[..., Any]]]:
    """Yield a function that changes the recorded sysfs as the kernel does for a driver's files."""

    def bind(card: Vfio, driver: str, _now: PciFunction) -> None:
        at = sysfs / "bus/pci/devices" / card.address
        override = driver if driver == DRIVER else "(null)"
        (at / "driver_override").write_text(f"{override}\n", encoding="ascii")
        (at / "driver").unlink(missing_ok=True)
        if driver:
            (at / "driver").symlink_to(sysfs / "bus/pci/drivers" / driver)

    yield Vfio, "_bind", bind
    yield Vfio, "_wait", lambda _card, group: sysfs / "kernel/iommu_groups" / group
