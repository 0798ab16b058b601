"""A separate home directory."""

import os
import pwd

import pytest


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Return an empty directory that is the account's home in this process."""
    place = tmp_path / "home"
    place.mkdir(mode=0o700)
    *account, _, shell = pwd.getpwuid(os.getuid())
    mine = pwd.struct_passwd((*account, str(place), shell))
    monkeypatch.setattr(pwd, "getpwuid", lambda _: mine)
    return place
