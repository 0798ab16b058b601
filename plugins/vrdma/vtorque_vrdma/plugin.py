"""``-vm vrdma=true``: an RDMA device in each guest, of the kind in ``[plugin.vrdma] backends``."""

from __future__ import annotations

from vtorque_core.api import Option, boolean, constant_hook
from vtorque_core.api.vm_options import show_boolean

VRDMA = Option(
    "vrdma", boolean, False, "RDMA between the job's guests", "BOOL", show_boolean,
    forbids=frozenset({"suspend", "save", "migrate"}), needs_root=bool,
)  # fmt: skip

vtorque_options = constant_hook(VRDMA)
