"""``-vm snap=true``: Snap collects metrics while the job runs. Which, and where: the site's."""

from __future__ import annotations

from vtorque_core.api import Option, always, boolean
from vtorque_core.api.vm_options import show_boolean

SNAP = Option("snap", boolean, False, "collect metrics of the job with Snap", "BOOL", show_boolean)

vtorque_options = always(SNAP)
