"""The root epilogue: walk the job's journals backwards, whatever the batch system says of it.

Runs as root on the node, as often as the batch system likes, also without a prologue.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from vtorque_core.errors import EXIT_FAILED, EXIT_OK, ConfigError
from vtorque_core.names import Paths
from vtorque_core.reap import release_job


def run(config: Path, job_id: str) -> int:
    """Release all that the job still holds on this node; return the hook's exit code.

    A site config that is broken, or that others than root can write, does not stop it: then the
    default directories hold. A user's directories would have a user's journals, which say what
    root is to remove.
    """
    reports = release_job(_paths(config), job_id)
    for report in reports:
        for line in report.lines():
            sys.stderr.write(f"vtorque: {line}\n")
    return EXIT_OK if all(report.clean for report in reports) else EXIT_FAILED


def _paths(config: Path) -> Paths:
    from vtorque_core.config import paths_of, read_toml  # noqa: PLC0415
    from vtorque_core.trust import require_root_owned  # noqa: PLC0415

    try:
        if config.exists():
            require_root_owned(config, uid=os.geteuid())
        return paths_of(read_toml(config))
    except ConfigError as error:
        sys.stderr.write(f"vtorque: warning: {error}\n")
        return Paths()
