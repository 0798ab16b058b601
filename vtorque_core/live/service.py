"""Information about this installation for plugins' own commands and services.

Raises ConfigError if the site config is invalid.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from vtorque_core.api.node_job import Site
from vtorque_core.api.setup_steps import Installation
from vtorque_core.api.strategies import BatchSystem
from vtorque_core.base.names import CONFIG_PATH, Paths
from vtorque_core.config.load import load
from vtorque_core.config.personal import VARIABLES
from vtorque_core.config.site_config import Site as SiteConfig
from vtorque_core.config.site_file import load_paths


def site_and_installation(config: Path | None) -> tuple[Site, Installation]:
    """Return the site config, and the command lines of hooks, job shell and reaper."""
    path = (config or CONFIG_PATH).resolve()
    site, _ = load(path, node=os.geteuid() == 0)
    return site, installation(site, site.path if site.owner else path)


def installation(site: SiteConfig, config: Path) -> Installation:
    """Describe this installation: paths and time limits of programs that batch systems start."""
    program, node = Path(sys.prefix, "bin", "vtorque"), site.node
    return Installation(
        program,
        config.absolute(),
        site.paths.jobshell,
        start_time=node.start_timeout + node.teardown_timeout,
        end_time=node.teardown_timeout,
        grace=node.grace,
        python=program.with_name("python3"),
    )


def installation_of(config: Path) -> Installation:
    """Return command lines of hooks, job shell and reaper. Loads no ``vtorque1.node`` module."""
    site, _ = load(config, node=False)
    return installation(site, config)


def own_variables() -> dict[str, str]:
    """Return the environment variables that locate a personal site; empty as root.

    Call it after the config is loaded.
    """
    if os.geteuid() == 0:
        return {}
    return {name: os.environ[name] for name in VARIABLES if name in os.environ}


def batch_system(config: Path) -> tuple[Site, BatchSystem]:
    """Return the site config and its batch system. Raises Refused if no plugin provides it."""
    site, plugins = load(config, node=False)
    return site, plugins.batch_system(site.batch.system)


def vmgr(config: Path, *words: str) -> list[str]:
    """Return the command line that runs this installation's ``vmgr`` with ``words``."""
    launcher = "/usr/bin/env", "--block-signal=INT", sys.executable
    argv = [*launcher, "-I", "-m", "vtorque_core.cli.vmgr"]
    return [*argv, "--config", str(config.absolute()), *words]


def paths(config: Path | None) -> Paths:
    """Return the site's paths, even if the rest of the config is invalid."""
    return load_paths(config or CONFIG_PATH)
