"""Describe this installation of vTorque for the node programs that the batch system starts."""

from __future__ import annotations

import sys
from pathlib import Path

from vtorque_core.api.setup_steps import Installation
from vtorque_core.site.config import Site


def installation(site: Site, config: Path) -> Installation:
    program, node = Path(sys.prefix, "bin", "vtorque"), site.node
    return Installation(
        program,
        config.absolute(),
        site.paths.jobshell,
        start_time=node.start_timeout + node.teardown_timeout,
        end_time=node.teardown_timeout,
        grace=node.grace,
        python=program.with_name("python3"),
    )
