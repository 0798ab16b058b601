"""Files that root reads: owners and modes of the file, its parent directories, and of secrets."""

import contextlib
import os
import stat
from pathlib import Path

import pytest

from vtorque_core.base.errors import ConfigError
from vtorque_core.base.trust import require_root_owned, require_secret


@pytest.fixture
def private_directory(tmp_path):
    tmp_path.chmod(0o755)
    path = tmp_path / "vtorque.toml"
    path.write_text("[node]\n")
    path.chmod(0o644)
    return path


def trusted(path: Path) -> None:
    require_root_owned(path, uid=os.getuid())


def test_own_files_below_a_sticky_directory_are_trusted(private_directory):
    trusted(private_directory)
    trusted(
        private_directory.parent
        / "."
        / ".."
        / private_directory.parent.name
        / private_directory.name
    )


def test_file_owned_by_another_user_is_rejected(private_directory):
    if os.getuid() == 0:
        os.chown(private_directory, 4242, 4242)
        with pytest.raises(
            ConfigError, match=f"{private_directory}: is owned by uid 4242.*chown root"
        ):
            require_root_owned(private_directory)
    else:
        with pytest.raises(ConfigError, match=f"is owned by uid {os.getuid()}"):
            require_root_owned(private_directory)


@pytest.mark.parametrize("mode", [0o664, 0o646])
def test_file_that_others_can_write_is_rejected(private_directory, monkeypatch, mode):
    monkeypatch.setattr(os, "getegid", lambda: 100)  # no private group
    private_directory.chmod(mode)
    with pytest.raises(
        ConfigError, match=f"{private_directory}: can be written by others .*{mode:o}.*chmod"
    ):
        trusted(private_directory)


def test_file_below_a_directory_that_others_can_write_is_rejected(private_directory):
    private_directory.parent.chmod(0o777)
    with pytest.raises(ConfigError, match=f"{private_directory.parent}: can be written by others"):
        trusted(private_directory)
    private_directory.parent.chmod(0o1777)
    trusted(private_directory)


def test_checked_directories_are_not_checked_again(private_directory, monkeypatch):
    known: dict[Path, Path] = {}
    require_root_owned(private_directory, os.getuid(), known)
    beside = private_directory.with_name("beside")
    beside.write_text("")
    beside.chmod(0o646)
    looked_at, real = [], os.lstat
    monkeypatch.setattr(os, "lstat", lambda path: looked_at.append(path) or real(path))
    with pytest.raises(ConfigError, match=f"{beside}: can be written by others"):
        require_root_owned(beside, os.getuid(), known)
    assert looked_at == [beside]


def test_links_are_followed_and_every_step_is_checked(private_directory, tmp_path):
    inner = tmp_path / "inner"
    inner.mkdir()
    (inner / "link").symlink_to("../vtorque.toml")
    (tmp_path / "start").symlink_to(inner / "link")
    trusted(tmp_path / "start")
    inner.chmod(0o777)
    with pytest.raises(ConfigError, match=f"{inner}: can be written"):
        trusted(tmp_path / "start")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ConfigError, match="too many symbolic links"):
        trusted(tmp_path / "loop")
    with pytest.raises(ConfigError, match="No such file"):
        trusted(tmp_path / "missing")


def test_secret_readable_by_others_is_rejected(private_directory):
    private_directory.chmod(0o640)
    with pytest.raises(ConfigError, match=f"mode 0640.*chmod 600 {private_directory}"):
        require_secret(private_directory, os.getuid())
    private_directory.chmod(0o600)
    require_secret(private_directory, os.getuid())
    with pytest.raises(ConfigError, match="is not a regular file"):
        require_secret(private_directory.parent, os.getuid())


@pytest.mark.parametrize(("gid", "own_gid", "mode", "fine"), [
    (1234, 1234, 0o775, True), (1234, 1234, 0o777, False), (1234, 100, 0o775, False),
    (100, 100, 0o775, False),
])  # fmt: skip
def test_private_group_of_a_user_is_trusted_as_the_user(
    monkeypatch, tmp_path, gid, own_gid, mode, fine
):
    """Debian and others give each user a group with the same number, and umask 002 with it."""
    real = os.lstat

    def lstat(path):
        found = real(path)
        if Path(path) != tmp_path:
            return os.stat_result((found.st_mode & ~0o022, *found[1:4], 0, *found[5:]))
        return os.stat_result((stat.S_IFDIR | mode, *found[1:4], 1234, gid, *found[6:]))

    monkeypatch.setattr(os, "lstat", lstat)
    monkeypatch.setattr(os, "getegid", lambda: own_gid)
    with contextlib.nullcontext() if fine else pytest.raises(ConfigError, match="chmod go-w"):
        require_root_owned(tmp_path, 1234)
    monkeypatch.setattr(os, "listxattr", lambda _: ["system.posix_acl_access"])
    with pytest.raises(ConfigError, match="chmod go-w"):  # the mode shows the ACL's mask
        require_root_owned(tmp_path, 1234)
