"""Public, for a plugin's node-wide process: what other distributions bring to that plugin.

A plugin that can be extended names a group of entry points, ``vtorque1.<plugin>``. What is there is
trusted as plugins are: root imports only what root alone can write. It goes with the plugins of its
distribution where ``[plugins]`` disables those.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from importlib_metadata import EntryPoint

from vtorque_core.base.errors import ConfigError
from vtorque_core.site import load as site_load
from vtorque_core.site import plugins
from vtorque_core.site.config import Site


@dataclass(frozen=True)
class Extensions:
    """The entry points of one group, of plugins that are not disabled; none is imported yet."""

    group: str
    found: tuple[EntryPoint, ...]

    def function(self, name: str) -> Callable[..., Any]:
        """Import the one of this name. As root only what nobody else can write.

        Raises ConfigError (there is none, or more than one; others can write it; not callable), or
        whatever its module raises.
        """
        named = [point for point in self.found if point.name == name]
        if len(named) != 1:
            known = ", ".join(sorted({point.name for point in self.found})) or "none"
            if not named:
                raise ConfigError(f"nothing brings {name!r} to {self.group}; there is: {known}")
            owners = ", ".join(sorted(plugins.owner(point) for point in named))
            raise ConfigError(f"{name!r} is brought to {self.group} by {owners}: disable one")
        function: Callable[..., Any] = plugins.imported(named[0])
        if not callable(function):
            raise ConfigError(f"{name!r} of {plugins.owner(named[0])} is no function")
        return function


def load(config: Path, group: str) -> tuple[Site, Extensions]:
    """Return the site config, and what is brought to a group. As root.

    Of acting modules, which are most of the imports, only those of the plugin that the group is of
    and of who brings something to it: the config has no settings that others declare there. Raises
    ConfigError, Conflict.
    """
    bring = {plugins.owner(point) for point in plugins.entry_points(group)}
    acting = {
        name
        for name, points in plugins.installed().items()
        if name == group.partition(".")[2] or not bring.isdisjoint(plugins.owner(p) for p in points)
    }
    site, known = site_load.load(config, node=acting)
    return site, Extensions(group, plugins.points_of(group, known.names))
