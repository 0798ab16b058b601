"""A file for node_exporter's textfile collector, replaced in one step."""

from __future__ import annotations

import grp
from collections.abc import Collection, Sequence
from pathlib import Path

from vtorque_core.api import HostFault, replace_file, require_root_owned
from vtorque_telemetry.api import Sample
from vtorque_telemetry.exposition import text
from vtorque_telemetry.settings import Settings


class Textfile:
    """See :class:`vtorque_telemetry.api.Sink`."""

    def __init__(self, settings: Settings) -> None:
        """Raise ConfigError if others can write its directory, HostFault for an unknown group."""
        self._path = Path(settings.textfile)
        require_root_owned(self._path.parent)
        self._mode = int(settings.textfile_mode, 8)
        try:
            self._gid = (
                grp.getgrnam(settings.textfile_group).gr_gid if settings.textfile_group else -1
            )
        except KeyError:
            raise HostFault(f"there is no group {settings.textfile_group!r}") from None

    def write(self, samples: Sequence[Sample], _deadline: float) -> None:
        """Replace the file."""
        replace_file(str(self._path), text(samples), mode=self._mode, gid=self._gid)

    def end(self, jobs: Collection[str]) -> None:
        """Do nothing: the next file does not have them."""

    def close(self) -> None:
        """Remove the file: node_exporter would tell its last values for ever."""
        self._path.unlink(missing_ok=True)
