"""The table ``[plugin.linux-guest]`` and the site's scripts that run in every guest."""

from __future__ import annotations

import os
import stat
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from vtorque_core.api import HostFault, Image, name_errors, setting

SCRIPT_BYTES = 1024 * 1024
"""Maximum size of a site script. Every guest's seed contains it."""


@dataclass(frozen=True)
class Settings:
    """Settings for the setup of every Linux guest of this site."""

    prologue: str = setting(
        "/etc/vtorque/guest/prologue",
        doc="directory of root-owned scripts, run as root in each guest before the job",
    )
    epilogue: str = setting(
        "/etc/vtorque/guest/epilogue",
        doc="directory of root-owned scripts, run as root in each guest after the job",
    )
    epilogue_timeout: float = setting(
        20.0,
        "time limit of the epilogue scripts in a guest that is shut down; must be "
        "below [node] release_timeout",
        "s",
    )
    precancel: str = setting(
        "/etc/vtorque/guest/precancel",
        doc="directory of root-owned scripts, run as the user in the job's first guest "
        "when the job is canceled",
    )
    cloud_config: str = setting(
        "/etc/vtorque/guest/cloud-config",
        doc="directory of root-owned cloud-config files for each guest with cloud-init",
    )
    user_modules: tuple[str, ...] = setting(
        ("packages", "write_files", "runcmd"),
        doc="cloud-config modules that users may use with -vm cloud_config, of packages, "
        "write_files, runcmd",
    )
    agent: str = setting(
        "{prefix}/lib/vtorque-agent.{arch}",
        doc="agent binary for images that lack it; {prefix} is vTorque's installation "
        "(/opt/vtorque), {arch} as in uname -m",
    )
    packages_debian: tuple[str, ...] = setting(
        (), doc="packages that Debian guests install at boot if missing"
    )
    packages_redhat: tuple[str, ...] = setting(
        (), doc="packages that Red Hat guests install at boot if missing"
    )
    security_updates: bool = setting(
        False, doc="install security updates at each boot (slow: each guest downloads them)"
    )

    def for_image(self, image: Image) -> Settings:
        """Return the settings for guests of an image.

        For a user's own image, omit the site's scripts and cloud-config, because programs in the
        image could read them.
        """
        if not image.source:
            return self
        return replace(self, prologue="", epilogue="", precancel="", cloud_config="")


def agent_path(settings: Settings, arch: str) -> Path:
    """Return the path of the agent binary for guests of an architecture."""
    return Path(settings.agent.replace("{prefix}", sys.prefix).replace("{arch}", arch))


@dataclass(frozen=True)
class SiteScript:
    """A site script: its name and content."""

    name: str
    content: bytes


def site_scripts(directory: str) -> tuple[SiteScript, ...]:
    """Return a directory's scripts in the order of their names, or () if it is empty or missing.

    Names that start with a dot or end in ``~`` are ignored. Raises HostFault for a script that is
    too large, or if anyone but root or the caller can write to the directory or a script.
    """
    path = Path(directory)
    if not directory:
        return ()
    try:
        names = sorted(os.listdir(path))  # noqa: PTH208 - names only, no Path objects
        _check_owner(path, path.stat())
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise HostFault(f"guest scripts {path}: {error.strerror}") from None
    return tuple(
        SiteScript(name, _read_script(path / name))
        for name in names
        if not name.startswith(".") and not name.endswith("~")
    )


def _read_script(path: Path) -> bytes:
    with name_errors(f"guest script {path}"):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise HostFault(f"guest script {path} is not a regular file")
        _check_owner(path, status)
        content = file.read(SCRIPT_BYTES + 1)
    if len(content) > SCRIPT_BYTES:
        raise HostFault(f"guest script {path} is larger than {SCRIPT_BYTES} bytes")
    return content


def _check_owner(path: Path, status: os.stat_result) -> None:
    if status.st_uid not in {0, os.geteuid()} or status.st_mode & 0o022:
        raise HostFault(f"{path} runs as root in guests, but users other than root can write it")
