"""Hide the site of the machine that runs the tests."""

import pytest

from vtorque_core.config import site_file


@pytest.fixture(autouse=True)
def _no_site_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the default site config be missing: this machine's site must not affect any test."""
    read = site_file._read

    def read_unless_default(path, may_be_missing):
        default = path == site_file.CONFIG_PATH and may_be_missing
        return site_file.Raw(path) if default else read(path, may_be_missing)

    monkeypatch.setattr(site_file, "_read", read_unless_default)
