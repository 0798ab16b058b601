"""The health check of the site's cloud-config files."""

from __future__ import annotations

from collections.abc import Iterator

import yaml

from vtorque_core.api import HostFault
from vtorque_core.api.health import HealthResult
from vtorque_core.api.node_job import Site
from vtorque_linux_guest.boot.cloud_config import header_problem
from vtorque_linux_guest.settings import Settings, site_scripts


def check(site: Site) -> Iterator[HealthResult]:
    """Check that the site's cloud-config files are YAML. Only the guest checks their schema."""
    where = site[Settings].cloud_config
    try:
        for file in site_scripts(where):
            text = file.content.decode("utf-8", "replace")
            problem = header_problem(text)
            try:
                if not problem and not isinstance(yaml.safe_load(text), dict):
                    problem = "is not a YAML mapping of modules"
            except yaml.YAMLError as error:
                problem = f"is not valid YAML: {error}"
            if problem:
                fix = f"for details run cloud-init schema --config-file {where}/{file.name}"
                yield HealthResult("failed", f"{where}/{file.name} {problem}", fix=fix)
            else:
                yield HealthResult("ok", f"guest cloud-config: {file.name}")
    except HostFault as error:
        yield HealthResult("failed", str(error), fix=f"chown root: and chmod go-w {where}")
