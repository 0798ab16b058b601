"""Declare keys of the site config as fields of a dataclass, with their documentation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any


def setting(
    default: Any = dataclasses.MISSING,
    doc: str = "",
    unit: str | None = None,
    check: Callable[[Any], object] | None = None,
    *,
    secret_file: bool = False,
) -> Any:
    """Declare one key of the site config, such as one of ``[plugin.<name>]``, as a field.

    Args:
        default: if missing, the site must set the key.
        doc: one line for ``vtorque config example``.
        unit: ``"MiB"`` or ``"s"``: the TOML value may then be a size or duration in text.
        check: called with each value except the default; raises ValueError.
        secret_file: the value is the path of a file that only root may read.
    """
    about = {"doc": doc, "unit": unit, "check": check, "secret_file": secret_file}
    return dataclasses.field(default=default, metadata=about)
