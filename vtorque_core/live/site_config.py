"""Read, validate and explain the site config, and find the installed plugins."""

from __future__ import annotations

import importlib.resources
from pathlib import Path

from vtorque_core.base.names import CONFIG_PATH as CONFIG_PATH
from vtorque_core.config import schema as schema
from vtorque_core.config.job_limits import OF_BATCH as OF_BATCH
from vtorque_core.config.job_limits import Facts as Facts
from vtorque_core.config.load import load as load
from vtorque_core.config.load import open_config as open_config
from vtorque_core.config.option_limits import Limits as Limits
from vtorque_core.config.option_limits import effective_default as effective_default
from vtorque_core.config.option_limits import refusal as refusal
from vtorque_core.config.option_limits import show_limits as show_limits
from vtorque_core.config.plugins import BUILTIN as BUILTIN
from vtorque_core.config.plugins import Plugins as Plugins
from vtorque_core.config.plugins import installed_plugins as installed_plugins
from vtorque_core.config.plugins import owner as owner
from vtorque_core.config.policy import applies as applies
from vtorque_core.config.policy import facts_of_user as facts_of_user
from vtorque_core.config.policy import for_job as for_job
from vtorque_core.config.policy import options_for as options_for
from vtorque_core.config.site_config import Site as Site
from vtorque_core.config.site_config import build as build
from vtorque_core.config.site_config import plugins_config as plugins_config
from vtorque_core.config.site_config import problems as problems
from vtorque_core.config.site_file import MAX_BYTES as MAX_BYTES
from vtorque_core.config.site_file import Raw as Raw
from vtorque_core.config.site_file import line_of as line_of
from vtorque_core.config.site_file import parse_toml as parse_toml
from vtorque_core.config.values import is_required as is_required


def site_templates(templates: Path) -> dict[Path, str]:
    """Return the site's templates, and the template that each replaces (``package:path``)."""
    found = {}
    for path in sorted(templates.glob("**/*.j2")):
        package = "vtorque_core.plan.domain" if path.parent == templates else path.parent.name
        try:
            top = Path(str(importlib.resources.files(package)))
        except (ImportError, TypeError):  # no such package
            top = templates / "none"
        replaced = [f"{package}:{each.relative_to(top)}" for each in top.rglob(path.name)]
        found[path] = ", ".join(sorted(replaced))
    return found
