"""What a submitter needs of the request: its form in one word, and ``-vm`` in scripts. Public."""

from __future__ import annotations

from vtorque_core.errors import printable
from vtorque_core.request import (
    from_token,
    script_directives,
    strip_pbs_vm,
    to_token,
    vm_directives,
)

__all__ = [
    "from_token",
    "printable",
    "script_directives",
    "strip_pbs_vm",
    "to_token",
    "vm_directives",
]
