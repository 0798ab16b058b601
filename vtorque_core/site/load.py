"""Load plugins and site config: the one way, on both sides of the trust boundary.

Whatever config a user names is harmless: the node decides again, by its own. As root neither the
config nor a plugin may lie where others than root can write; each is checked where it is read.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from vtorque_core.base.names import Paths
from vtorque_core.site.config import Raw, Site, build, paths_of, plugins_config, read_toml
from vtorque_core.site.plugins import Plugins


def load(path: Path, *, node: bool | Collection[str], new: bool = False) -> tuple[Site, Plugins]:
    """Return the site config at ``path`` and the plugins it enables.

    ``node``: also their acting modules, as all but ``vsub`` and the job shell need; or those of
    the plugins of these names. ``new``: see :func:`read_toml`. Raises ConfigError, Conflict.
    """
    raw, plugins = opened(path, node=node, new=new)
    return build(raw, plugins, node=node is True), plugins


def opened(path: Path, *, node: bool | Collection[str], new: bool = False) -> tuple[Raw, Plugins]:
    """Return the config as it is written, unchecked, and the plugins it enables."""
    raw = read_toml(path, new=new)
    wanted = plugins_config(raw)
    return raw, Plugins.load(node=node, enable=wanted.enable, disable=wanted.disable)


def load_paths(path: Path) -> Paths:
    """Return the directories alone, without any plugin: for what must work with all else broken.

    Raises ConfigError.
    """
    return paths_of(read_toml(path))
