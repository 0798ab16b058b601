"""Load plugins and site config, as the two sides of the trust boundary do it."""

from __future__ import annotations

import os
from pathlib import Path

from vtorque_core.config import CONFIG_PATH, Site, build, plugins_config, read_toml
from vtorque_core.plugins import Plugins


def load_for_user() -> tuple[Site, Plugins]:
    """Return config and declaring plugins for an unprivileged command.

    ``VTORQUE_CONFIG`` names another config file: harmless here, since the node decides again.
    """
    return load(Path(os.environ.get("VTORQUE_CONFIG") or CONFIG_PATH), node=False)


def load_for_root(path: Path, only: frozenset[str] | None = None) -> tuple[Site, Plugins]:
    """Return config and all plugins for root's entry points.

    Raises ConfigError if the config or a plugin lies where others than root can write.
    """
    from vtorque_core.trust import require_root_owned  # noqa: PLC0415

    if path.exists():
        require_root_owned(path)
    return load(path, node=True, only=only)


def load(path: Path, *, node: bool, only: frozenset[str] | None = None) -> tuple[Site, Plugins]:
    """Return the site config at ``path`` (defaults if there is none) and the plugins it enables."""
    raw = read_toml(path)
    wanted = plugins_config(raw)
    plugins = Plugins.load(node=node, enable=wanted.enable, disable=wanted.disable, only=only)
    return build(raw, plugins, node=node), plugins
