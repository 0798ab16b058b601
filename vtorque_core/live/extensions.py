"""Load entry points of the group ``vtorque1.<plugin>``, which extend a plugin."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from importlib_metadata import EntryPoint

from vtorque_core.base.errors import ConfigError
from vtorque_core.config import load as site_load
from vtorque_core.config import plugins
from vtorque_core.config.site_config import Site


@dataclass(frozen=True)
class Extensions:
    """Entry points of one group, not yet imported, without those of disabled plugins."""

    group: str
    found: tuple[EntryPoint, ...]

    def function(self, name: str) -> Callable[..., Any]:
        """Import and return the function of this name.

        Raises ConfigError if no or several distributions provide the name, if the object is not
        callable, or if users other than root can write its module. Also raises the module's errors.
        """
        named = [point for point in self.found if point.name == name]
        if len(named) != 1:
            known = ", ".join(sorted({point.name for point in self.found})) or "none"
            if not named:
                raise ConfigError(
                    f"no installed distribution provides {name!r} in {self.group}; "
                    f"available: {known}"
                )
            owners = ", ".join(sorted(plugins.owner(point) for point in named))
            raise ConfigError(
                f"several distributions provide {name!r} in {self.group} ({owners}): "
                "disable all but one"
            )
        function: Callable[..., Any] = plugins.import_point(named[0])
        if not callable(function):
            raise ConfigError(f"{name!r} of {plugins.owner(named[0])} is not a function")
        return function


def load(config: Path, group: str) -> tuple[Site, Extensions]:
    """Return the site config, and a plugin's extensions. Privileges: root.

    ``group`` is ``vtorque1.<plugin>``. Loads ``vtorque1.node`` modules, with their settings, only
    of this plugin and of its extensions. Raises ConfigError or Conflict.
    """
    bring = {plugins.owner(point) for point in plugins.entry_points(group)}
    acting = {
        name
        for name, points in plugins.installed_plugins().items()
        if name == group.partition(".")[2] or not bring.isdisjoint(plugins.owner(p) for p in points)
    }
    site, known = site_load.load(config, node=acting)
    return site, Extensions(group, plugins.points_of(group, known.names))
