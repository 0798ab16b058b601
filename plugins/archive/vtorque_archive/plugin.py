"""Settings and hooks of the archive of a user's job records."""

from __future__ import annotations

import os
import pwd
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import TYPE_CHECKING

from vtorque_core.api import constant_hook, hookimpl, setting

if TYPE_CHECKING:
    from vtorque_core.api.kept_records import Place
    from vtorque_core.api.node_job import Site

PLACEHOLDERS = ("home", "user", "uid")


@dataclass(frozen=True)
class Settings:
    """Settings in ``[plugin.archive]``."""

    directory: str = setting(
        "",
        doc="directory for records of ended jobs, written as the job's owner; {home} "
        "{user} {uid} are replaced; empty: none",
    )
    file_mib: int = setting(
        16, unit="MiB", doc="maximum size that one node writes for a job attempt"
    )
    mib: int = setting(
        256, unit="MiB", doc="maximum size for one user; the oldest files are removed first"
    )
    days: float = setting(90.0, doc="files older than this are removed")

    def __post_init__(self) -> None:
        """Validate the values. Raise ValueError if a value is invalid."""
        words = set(re.findall(r"\{([^{}]*)\}", self.directory))
        if self.directory and not self.directory.startswith(("/", "{home}/")):
            raise ValueError(
                "directory is invalid: write an absolute path, or one that begins with {home}/"
            )
        if ".." in PurePath(self.directory).parts:
            raise ValueError("directory is invalid: write a path without '..'")
        if self.directory and (not words or not words <= set(PLACEHOLDERS)):
            known = " ".join(f"{{{name}}}" for name in PLACEHOLDERS)
            raise ValueError(f"directory must differ between users: use one or more of {known}")
        if not 1 <= self.file_mib <= min(self.mib, 256):
            raise ValueError(
                f"file_mib={self.file_mib} is invalid: it must be 1 to 256, and at most "
                f"mib={self.mib}"
            )
        if not self.days > 0:
            raise ValueError(f"days={self.days} is invalid: it must be more than 0")


def directory_of(template: str, user: pwd.struct_passwd) -> Path:
    """Return the directory of a user's archives."""
    values = {"home": user.pw_dir, "user": user.pw_name, "uid": str(user.pw_uid)}
    for name, value in values.items():
        template = template.replace(f"{{{name}}}", value)
    return Path(template)


# Code in a guest can write to directory $1, so a symbolic link at $2 is not followed.
_NOTE = 'umask 077; mkdir -p "$1" && cd "$1" && rm -f "./$2" && set -C && echo "$3" >"./$2"'


@hookimpl
def vtorque_after_script(place: Place, code: int, site: Site) -> Iterator[Sequence[str]]:
    """Yield a command that records the exit code, which some batch systems hide from root."""
    user = _caller()
    if site[Settings].directory and user is not None:
        from vtorque_archive.pack import note_of  # noqa: PLC0415 - not by vsub

        name = note_of(place.key, str(place.facts().get("node", "")))
        directory = str(directory_of(site[Settings].directory, user))
        yield ["/bin/sh", "-c", _NOTE, "sh", directory, name, str(code)]


@hookimpl
def vtorque_kept_records(site: Site) -> Iterator[Place]:
    """Yield the records in the calling user's archives."""
    user = _caller()
    if site[Settings].directory and user is not None:
        from vtorque_archive.read import archives  # noqa: PLC0415 - not by vsub

        directory = directory_of(site[Settings].directory, user)
        yield from archives(site.paths, directory, user.pw_uid)


def _caller() -> pwd.struct_passwd | None:
    try:
        return pwd.getpwuid(os.getuid())
    except KeyError:
        return None


vtorque_settings = constant_hook(Settings)
