"""``-vm snap=true``: collect metrics with Snap while the job runs."""

from __future__ import annotations

from vtorque_core.api import Option, boolean, constant_hook
from vtorque_core.api.vm_options import show_boolean

SNAP = Option("snap", boolean, False, "collect metrics of the job with Snap", "BOOL", show_boolean)

vtorque_options = constant_hook(SNAP)
