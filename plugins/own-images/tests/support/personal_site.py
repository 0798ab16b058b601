"""A personal site, for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vtorque_own_images.plugin import Settings


class PersonalSite:
    """The part of a personal site that the plugin reads."""

    owner = 1000
    path = Path("/nonexistent/vtorque.toml")

    def __init__(self, **settings: Any) -> None:
        self._settings = Settings(**settings)

    def __getitem__(self, table: type[Any]) -> Any:
        return self._settings if table is Settings else table()
