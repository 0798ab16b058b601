"""-vm vrdma=true: an RDMA device in each guest of the job. Which kind: [plugin.vrdma] backends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vtorque_core.api import Option, boolean, hookimpl
from vtorque_core.api_options import show_boolean

VRDMA = Option("vrdma", boolean, False, "RDMA between the job's guests", "BOOL", show_boolean)


@hookimpl
def vtorque_options() -> Iterator[Option[Any]]:
    """Yield the key."""
    yield VRDMA
