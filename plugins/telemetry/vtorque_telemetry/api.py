"""Public: what telemetry measures, and how another distribution takes it somewhere else.

The node's sampler makes :class:`Sample` objects, the same for all exporters. An exporter is an
entry point of the group :data:`GROUP`, ``acme = "acme.push:open_sink"``: a function that gets the
site config and returns a :class:`Sink`. If ``exporters`` in ``[plugin.telemetry]`` names it the
sampler's process imports and calls it, as root, in a thread of its own: within ten seconds it opens
what needs root (a port, a secret, a directory), and neither hears nor tells anybody yet. Then the
process becomes ``uid``, without rights; all of the sink's methods run there, in the sink's thread.
If it raises, that is logged once and tried again, as root, in another process a minute later.

Names and units follow Prometheus (https://prometheus.io/docs/practices/naming/): base units,
``_total`` for counters.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from vtorque_core.api import ConfigError, require_secret

GROUP = "vtorque1.telemetry"
_MAX_SECRET = 4096  # bytes


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured value.

    Args:
        name: of ``[a-z_][a-z0-9_]*``, base unit last, counters with ``_total``.
        value: in the base unit: seconds, bytes, cores.
        labels: ``job``, ``user``, ``node``, with a guest's also ``guest`` (its rank); then the
            sample's own. Safe for every format: printable, at most 200 characters each.
        kind: a counter only grows while its guest lives.
        time: when it was measured, Unix seconds.
        help: one line.
    """

    name: str
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)
    kind: Literal["counter", "gauge"] = "gauge"
    time: float = 0.0
    help: str = ""


class Sink(Protocol):
    """An open exporter. Each has a thread of its own, so that only its own samples wait for it.

    What it raises is logged, once until it works again; no job notices.
    """

    def write(self, samples: Sequence[Sample], deadline: float) -> None:
        """Take all samples of one moment, those of all jobs on this node.

        ``deadline`` in ``time.monotonic()`` seconds. Samples that come while an earlier ``write``
        has not returned are lost to this sink, and counted.
        """
        ...

    def end(self, jobs: Collection[str]) -> None:
        """Forget the series of jobs that have ended, by their label ``job``."""
        ...

    def close(self) -> None:
        """Stop: no job is left. The process ends half a second later, finished or not."""
        ...


def read_secret(path: str | Path) -> str:
    """Return the first line of a file that only root may read. As root.

    Raises ConfigError: others can reach it, it is missing, longer than 4096 bytes or no text.
    """
    require_secret(Path(path), os.geteuid())
    try:
        text = Path(path).read_bytes()[: _MAX_SECRET + 1].decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from None
    line = text.partition("\n")[0].strip()
    if not line or len(text) > _MAX_SECRET:
        raise ConfigError(f"{path}: must have one line of at most {_MAX_SECRET} bytes")
    return line
