"""Load plugins and site config.

Processes of root accept only a config and plugins that nobody else can write.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from vtorque_core.api.batch_system import NodeAdapter
from vtorque_core.base.names import Paths
from vtorque_core.config import site_config
from vtorque_core.config.plugins import Plugins
from vtorque_core.config.schema import Node


def load(
    path: Path, *, node: bool | Collection[str], new: bool = False
) -> tuple[site_config.Site, Plugins]:
    """Return the site config at ``path`` and the plugins that it enables.

    ``node``: see :meth:`Plugins.load`. ``new``: the file may be missing.
    """
    raw, plugins = open_config(path, node=node, new=new)
    return site_config.build(raw, plugins, node=node is True), plugins


def load_node(path: Path) -> tuple[NodeAdapter, site_config.Site, Plugins]:
    """Return the batch system's adapter, config and plugins, for a hook that starts guests.

    Creates directories that a reboot removed. Privileges: root.
    """
    from vtorque_core.config import directories  # noqa: PLC0415 - not by vsub

    site, plugins = load(path, node=True)
    directories.make_missing(site)
    return plugins.batch_system(site.batch.system).node(site), site, plugins


def open_config(
    path: Path, *, node: bool | Collection[str], new: bool = False
) -> tuple[site_config.Raw, Plugins]:
    raw = site_config.read_toml(path, new=new)
    wanted = site_config.plugins_config(raw)
    return raw, Plugins.load(node=node, enable=wanted.enable, disable=wanted.disable)


def load_paths(path: Path) -> Paths:
    return site_config.paths_of(site_config.read_toml(path))


def load_for_teardown(path: Path) -> tuple[Paths, Node]:
    """Return ``[paths]`` and ``[node]``, even if other tables are invalid. Raises ConfigError."""
    raw = site_config.read_toml(path)
    return site_config.paths_of(raw), site_config.node_of(raw)
