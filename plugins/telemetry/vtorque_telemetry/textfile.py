"""Write a file for node_exporter's textfile collector. Each write replaces the file atomically."""

from __future__ import annotations

import grp
import os
from collections.abc import Collection, Sequence
from pathlib import Path

from vtorque_core.api import ConfigError, HostFault, closing, require_root_owned
from vtorque_core.api.node_job import Site
from vtorque_telemetry.api import Sample
from vtorque_telemetry.exposition import text
from vtorque_telemetry.settings import Settings


class Textfile:
    """The text file sink, see :class:`vtorque_telemetry.api.SampleSink`."""

    def __init__(self, settings: Settings) -> None:
        """Create the file's directory, owned by ``uid`` of the settings, and set its group.

        Raises:
            ConfigError: another user owns or could replace the directory.
            HostFault: the group is unknown.
            OSError: the directory cannot be created or changed.
        """
        self._path = Path(settings.textfile)
        self._mode = int(settings.textfile_mode, 8)
        try:
            group = settings.textfile_group
            gid = grp.getgrnam(group).gr_gid if group else -1
        except KeyError:
            raise HostFault(f"the group {settings.textfile_group!r} does not exist") from None
        if os.geteuid() == 0:
            _create_directory(self._path.parent, settings.uid, gid)

    def write(self, samples: Sequence[Sample], _deadline: float) -> None:
        """Replace the file. Raises OSError."""
        fresh = self._path.with_name(f".{self._path.name}.new")
        fresh.unlink(missing_ok=True)
        fresh.touch(0o600, exist_ok=False)
        fresh.write_bytes(text(samples))
        fresh.chmod(self._mode)
        fresh.replace(self._path)

    def end(self, jobs: Collection[str]) -> None:
        """Do nothing: the next write omits these jobs."""

    def close(self) -> None:
        """Remove the file, because node_exporter would keep reporting its last values."""
        self._path.unlink(missing_ok=True)


def _create_directory(directory: Path, uid: int, gid: int) -> None:
    """Create the directory if it is missing, and set its group, which new files inherit."""
    require_root_owned(directory.parent)
    if not directory.exists():
        directory.mkdir(0o700)
        os.chown(directory, uid, -1)
    with closing(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)) as descriptor:
        owner = os.fstat(descriptor).st_uid
        if owner != uid:
            raise ConfigError(
                f"{directory} belongs to uid {owner}, but must belong to uid {uid} "
                "([plugin.telemetry] uid), which writes the file. Name a directory that does not "
                "exist, and vTorque creates it"
            )
        os.fchown(descriptor, -1, gid)
        os.fchmod(descriptor, 0o2755)


def open_file(site: Site) -> Textfile:
    """Return the text file sink. Raises HostFault, ConfigError."""
    return Textfile(site[Settings])
