"""Doubles that let tests run root's code as any user."""

import os
import pwd
from pathlib import Path

import pytest


def without_chown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let files keep their owner, if the tests do not run as root."""
    if os.geteuid() != 0:
        monkeypatch.setattr(os, "chown", lambda *_, **__: None)


def with_a_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give every account a shell and a home: the user nobody has neither."""
    real = pwd.getpwuid

    def found(uid: int) -> pwd.struct_passwd:
        *account, home, _ = real(uid)
        return pwd.struct_passwd((*account, home if Path(home).is_dir() else "/", "/bin/sh"))

    monkeypatch.setattr(pwd, "getpwuid", found)
