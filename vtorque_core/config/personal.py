"""Personal site: vTorque for a user without root, on a machine without the admin's site.

All files are in the user's XDG base directories. Jobs and QEMU run as the user (libvirt's session
mode).
"""

from __future__ import annotations

import contextlib
import os
import pwd
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vtorque_core.base.errors import ConfigError
from vtorque_core.base.names import CONFIG_PATH, Paths
from vtorque_core.base.trust import require_root_owned

_DEFAULTS = {
    "XDG_CONFIG_HOME": ".config", "XDG_STATE_HOME": ".local/state",
    "XDG_DATA_HOME": ".local/share", "XDG_CACHE_HOME": ".cache",
}  # fmt: skip
VARIABLES = ("HOME", "XDG_RUNTIME_DIR", *_DEFAULTS)
"""Variables by which vTorque and libvirt find a user's directories."""


def is_personal_path(path: Path) -> bool:
    """Return True if this config path means the caller's personal site."""
    if os.geteuid() == 0:
        return False
    if path == CONFIG_PATH:
        return not os.path.lexists(path) and not Paths().state.exists()
    with contextlib.suppress(ConfigError):  # a daemon whose uid has no account
        return path == config()
    return False


def config() -> Path:
    return _home("XDG_CONFIG_HOME") / "vtorque.toml"


def require_own_directories() -> None:
    """Check that nobody else can change config, state and libvirt's files.

    Variables such as XDG_CONFIG_HOME can name another user's directories, for example after ``su``.
    """
    libvirt = ("XDG_CONFIG_HOME", "XDG_CACHE_HOME")  # libvirtd of a session uses both
    places = [(each, config() if each == libvirt[0] else _home(each)) for each in _DEFAULTS]
    places += [(each, _home(each).with_name("libvirt")) for each in libvirt]
    for variable, path in places:
        existing = next(each for each in (path, *path.parents) if os.path.lexists(each))
        try:
            require_root_owned(existing, os.geteuid())
            if existing != path and existing.stat().st_mode & stat.S_ISVTX:
                raise ConfigError(f"{path}: does not exist, and other users could create it")
        except ConfigError as error:
            raise ConfigError(f"{error}; or set {variable} to a directory of your own") from None


def account() -> pwd.struct_passwd:
    """Return the caller's account. Raises ConfigError if it does not exist (some containers)."""
    uid = os.geteuid()
    try:
        return pwd.getpwuid(uid)
    except KeyError:
        advice = f"ask your admin why getent passwd {uid} prints nothing"
        raise ConfigError(f"uid {uid} has no account on this machine: {advice}") from None


def defaults() -> Mapping[str, Mapping[str, Any]]:
    """Return the personal site's defaults, as TOML values, and set HOME and XDG_RUNTIME_DIR.

    libvirt's client finds its daemon by these variables.
    """
    state = _home("XDG_STATE_HOME")
    runtime = _runtime(state / "run")
    os.environ.update(XDG_RUNTIME_DIR=str(runtime), HOME=account().pw_dir)
    for variable in _DEFAULTS:  # GLib, and thus libvirt, would use a relative path
        if not os.environ.get(variable, "/").startswith("/"):
            del os.environ[variable]
    return {
        "paths": {"state": str(state), "run": str(runtime / "vtorque"), "commands": ""},
        "node": {
            "libvirt_uri": "qemu:///session", "qemu_user": "", "guest_uids": 0,
            "subordinate_ids": 0,
        },
        "images": {"pool": str(_home("XDG_DATA_HOME") / "images"), "keep": 0},
        "network": {"kind": "user", "source": ""},
        "options": {"img": {"default": "micro"}},
    }  # fmt: skip


def _home(variable: str) -> Path:
    given, default = os.environ.get(variable, ""), Path(account().pw_dir, _DEFAULTS[variable])
    return (Path(given) if given.startswith("/") else default) / "vtorque"


def _runtime(link: Path) -> Path:
    """Return the login session's runtime directory, otherwise a private directory in /tmp.

    ``link`` points to the directory in /tmp. The directory's name is random, because another user
    could create a predictable name first.
    """
    for given in (os.environ.get("XDG_RUNTIME_DIR", ""), f"/run/user/{os.geteuid()}"):
        if given.startswith("/") and _is_own(Path(given)):
            return Path(given)
    mask = os.umask(0o077)  # mkdir's mode is not that of parents
    try:
        link.parent.mkdir(parents=True, exist_ok=True)
        for _ in range(2):  # after a reboot, another user can create the name, which was visible
            with contextlib.suppress(FileExistsError):
                link.symlink_to(f"/tmp/vtorque-{os.geteuid()}-{os.urandom(8).hex()}")  # noqa: S108
            place = link.readlink()
            with contextlib.suppress(FileExistsError):
                place.mkdir(mode=0o700)
            if _is_own(place):
                return place
            link.unlink()
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}") from None
    finally:
        os.umask(mask)
    raise ConfigError(f"{place}: is not a directory that only you can access (mode 0700)")


def _is_own(place: Path) -> bool:
    with contextlib.suppress(ConfigError, OSError):
        require_root_owned(place, os.geteuid())
        status = place.lstat()
        return status.st_uid == os.geteuid() and status.st_mode == stat.S_IFDIR | 0o700
    return False
