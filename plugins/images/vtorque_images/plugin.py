"""The plugin's commands below ``vmgr images``. Other plugins add more, such as ``add``."""

from __future__ import annotations

from types import ModuleType

from vtorque_core.api import Command, constant_hook


def _pool() -> ModuleType:
    from vtorque_images import pool_commands  # noqa: PLC0415 - click

    return pool_commands


def _make() -> ModuleType:
    from vtorque_images import make  # noqa: PLC0415 - click

    return make


def _sign() -> ModuleType:
    from vtorque_images import sign  # noqa: PLC0415 - click

    return sign


vtorque_commands = constant_hook(
    Command("vmgr images list", lambda: _pool().list_command),
    Command("vmgr images show", lambda: _pool().show),
    Command("vmgr images verify", lambda: _pool().verify),
    Command("vmgr images remove", lambda: _pool().remove),
    Command("vmgr images label", lambda: _pool().label),
    Command("vmgr images default", lambda: _pool().default),
    Command("vmgr images build", lambda: _make().build),
    Command("vmgr images sign", lambda: _sign().sign),
)
