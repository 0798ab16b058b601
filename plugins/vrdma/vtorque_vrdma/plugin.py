"""``-vm vrdma=true``: an RDMA device in each guest, of the kind in ``[plugin.vrdma] backends``."""

from __future__ import annotations

from vtorque_core.api import Option, always, boolean
from vtorque_core.api.vm_options import show_boolean

VRDMA = Option(
    "vrdma", boolean, False, "RDMA between the job's guests", "BOOL", show_boolean,
    forbids=frozenset({"suspend", "save", "migrate"}), needs_root=bool,
)  # fmt: skip

vtorque_options = always(VRDMA)
