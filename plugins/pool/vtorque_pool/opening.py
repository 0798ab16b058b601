"""Load the pool's site config and drivers, open its log, and switch from root to SlurmUser."""

from __future__ import annotations

import contextlib
import os
import pwd
import time
from collections.abc import Callable
from pathlib import Path

from vtorque_core.api import ConfigError, HostFault, name_errors, printable
from vtorque_core.api.node_job import Site
from vtorque_core.live import extensions
from vtorque_core.live.service import site_and_installation
from vtorque_pool.api import Driver
from vtorque_pool.machines import Machines
from vtorque_pool.settings import Settings

CONFIG = Path("/etc/vtorque/vtorque.toml")
GROUP = "vtorque1.pool"


def open_pool(config: Path | None) -> tuple[Site, Machines]:
    """Return the site config and the pool's machines.

    Raises:
        ConfigError: If the config is invalid.
        HostFault: If a driver's library is missing.
    """
    site, brought = extensions.load((config or CONFIG).resolve(), GROUP)
    settings: Settings = site[Settings]
    if not settings.shapes:
        raise ConfigError("[plugin.pool] has no shapes; doc/pool.md describes them")
    log = logger(Path(settings.log))
    drivers: dict[str, Driver] = {}
    for name in settings.clouds:  # even without a shape: its machines must be deleted
        options = dict(settings.clouds[name])
        kind = options.pop("driver")
        with name_errors(f"[plugin.pool.clouds.{name}]", ValueError, fault=ConfigError):
            drivers[name] = brought.function(kind)(options)
    return site, Machines(settings, drivers, log)


def logger(path: Path) -> Callable[[str], None]:
    """Return a function that writes a line to the log, or to stderr if the log is not writable."""

    def log(text: str) -> None:
        when = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        line = f"{when} [{os.getpid()}] {printable(text, 2000)}\n".encode()
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            descriptor = os.open(path, flags, 0o640)
        except OSError:
            with contextlib.suppress(OSError):
                os.write(2, line)
            return
        try:
            os.write(descriptor, line)
        finally:
            os.close(descriptor)

    return log


def become_owner(config: Path | None) -> None:
    """Switch from root to the owner of the state directory (SlurmUser)."""
    place = Path(site_and_installation(config)[0][Settings].state)
    if os.geteuid() != 0 or not place.is_dir() or place.stat().st_uid == 0:
        return
    try:
        user = pwd.getpwuid(place.stat().st_uid)
    except KeyError:
        raise HostFault(
            f"{place} belongs to uid {place.stat().st_uid}, which is not a user of this host"
        ) from None
    os.initgroups(user.pw_name, user.pw_gid)
    os.setresgid(user.pw_gid, user.pw_gid, user.pw_gid)
    os.setresuid(user.pw_uid, user.pw_uid, user.pw_uid)
    os.environ["HOME"] = user.pw_dir


def require_state(settings: Settings) -> None:
    """Create the state directory and check its owner."""
    place = Path(settings.state)
    try:
        place.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise HostFault(f"{place}: {error.strerror}: run vtorque pool setup to create it") from None
    if place.stat().st_uid != os.geteuid() and os.geteuid() != 0:
        raise HostFault(
            f"{place} belongs to another user: run vtorque pool setup to give it to Slurm's user"
        )
