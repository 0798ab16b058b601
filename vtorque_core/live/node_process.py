"""Public: a plugin's one process for all jobs of a node, and how it begins."""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Self

from vtorque_core.api.acquired import unjournalled
from vtorque_core.api.daemon_process import Process
from vtorque_core.base.errors import HostFault
from vtorque_core.base.names import Paths

if TYPE_CHECKING:
    from vtorque_core.api.node_job import NodeJob

LOG_BYTES = 256 * 1024  # of each of two files


@dataclass(frozen=True)
class NodeProcess(Process):
    """Started by the first job that wants it, ended with the last; root.

    It is ``python -m`` of ``module``, whose ``main`` calls :func:`begin`; the subclass stands
    elsewhere, since no job's hook needs that program. A node has one, known by its lock
    ``<run>/<name>.lock`` alone: settings change with the next one.
    """

    scope: ClassVar = "node"
    name: ClassVar[str]
    module: ClassVar[str]
    argv: tuple[str, ...] = unjournalled(("process of the node",))
    lock: str = ""

    @classmethod
    def of(cls, paths: Paths, *words: Path | float) -> Self:
        """Return that of a node; ``words``: what its ``main`` gets beside where the files are."""
        arguments = (str(word) for word in (paths.state, paths.run, *words))
        argv = (sys.executable, "-I", "-m", cls.module, *arguments)
        return cls(argv, lock=str(paths.run / f"{cls.name}.lock"))

    @classmethod
    def start(cls, job: NodeJob, without: str) -> None:
        """Start that of a job's node with the site's config, unless another job has. Never waits.

        A fault (a full /run) is no reason for the job to fail: it is warned what it is ``without``.
        """
        try:
            job.acquire(cls.of(job.site.paths, job.site.path))
        except HostFault as error:
            job.warn(f"{without}: {error}")


def begin(name: str) -> tuple[Paths, list[str]]:
    """Begin such a process: what it logs is in ``<state>/<name>.log``, its files are root's alone.

    Returns where the node's files are, and the words that it was given. Raises OSError.
    """
    from logging.handlers import RotatingFileHandler  # noqa: PLC0415 - not by who starts it

    state, run, *words = sys.argv[1:]
    os.umask(0o077)
    handler = RotatingFileHandler(Path(state, f"{name}.log"), maxBytes=LOG_BYTES, backupCount=1)
    logging.basicConfig(level="INFO", format="%(asctime)s %(message)s", handlers=[handler])
    return Paths(Path(state), Path(run)), words
