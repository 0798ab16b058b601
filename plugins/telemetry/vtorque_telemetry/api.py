"""Public API: the measured samples, and how a distribution provides an exporter for them.

The node's sampler passes the same :class:`Sample` objects to all exporters. An exporter is an entry
point of the group :data:`GROUP`, such as ``acme = "acme.push:open_sink"``. It is a function that
takes the site config and returns a :class:`SampleSink`. Enable it in ``[plugin.telemetry]
exporters``.

Life cycle:

1. The sampler starts a process that calls the function as root, in a thread. The function opens
   ports, secrets or directories within ten seconds, but exchanges no data yet. An error is logged,
   and a new process calls the function again a minute later, as root.
2. The process drops all privileges and runs as the user id ``uid`` of the settings. One thread per
   sink calls the sink's methods.

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
        name: matches ``[a-z_][a-z0-9_]*``, with the base unit last, and ``_total`` for counters.
        value: in the base unit: seconds, bytes, cores.
        labels: ``job``, ``user`` and ``node``, then the labels of this metric. Samples of a guest
            also have ``guest``, its rank. Values are printable and have at most 200 characters.
        kind: ``counter`` or ``gauge``. A counter only grows while its guest lives.
        time: time of the measurement, Unix seconds.
        help: description in one line.
    """

    name: str
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)
    kind: Literal["counter", "gauge"] = "gauge"
    time: float = 0.0
    help: str = ""


class SampleSink(Protocol):
    """An open exporter. Each sink has its own thread, so a slow sink loses only its own samples.

    After an exception, no other exception is logged until the sink works again. Jobs are not
    affected.
    """

    def write(self, samples: Sequence[Sample], deadline: float) -> None:
        """Export all samples of one moment, of all jobs on this node.

        ``deadline`` is in ``time.monotonic()`` seconds. While ``write`` runs, only the newest
        samples wait for the next call. Older ones are lost to this sink, and counted.
        """
        ...

    def end(self, jobs: Collection[str]) -> None:
        """Forget the series of ended jobs; ``jobs`` are values of the label ``job``."""
        ...

    def close(self) -> None:
        """Close the sink. The process of the sinks then ends, because the node has no more jobs.

        Must return within half a second.
        """
        ...


def read_secret(path: str | Path) -> str:
    """Return the first line of a file that only root may read.

    Privileges: root.

    Raises:
        ConfigError: other users can read the file, or it is missing, longer than 4096 bytes or not
            text.
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
