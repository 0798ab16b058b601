"""Load plugins and site config.

Processes of root accept only a config and plugins that nobody else can write.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from vtorque_core.config import site_config, site_file
from vtorque_core.config.plugins import Plugins


def load(
    path: Path, *, node: bool | Collection[str], new: bool = False
) -> tuple[site_config.Site, Plugins]:
    """Return the site config at ``path`` and the plugins that it enables.

    ``node``: see :meth:`Plugins.load`. ``new``: the file may be missing.
    """
    raw, plugins = open_config(path, node=node, new=new)
    return site_config.build(raw, plugins, node=node is True), plugins


def open_config(
    path: Path, *, node: bool | Collection[str], new: bool = False
) -> tuple[site_file.Raw, Plugins]:
    raw = site_file.read_toml(path, new=new)
    wanted = site_config.plugins_config(raw)
    return raw, Plugins.load(node=node, enable=wanted.enable, disable=wanted.disable)
