"""Register ``vmgr ps``, ``vmgr cancel`` and ``vtorque config explain``."""

from __future__ import annotations

from vtorque_core.api import Command, constant_hook

vtorque_commands = constant_hook(
    Command("vmgr ps", "vtorque_jobs.command:ps"),
    Command("vmgr cancel", "vtorque_jobs.command:cancel"),
    Command("vtorque config explain", "vtorque_jobs.explain:explain"),
)
