"""Personal sites of users: when they apply, their paths, and their limits without root."""

from __future__ import annotations

import math
import os
import pwd
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from vtorque_core.base.errors import ConfigError, Refused
from vtorque_core.base.names import Paths
from vtorque_core.config import personal
from vtorque_core.config.load import load
from vtorque_core.config.policy import check_options, facts_of_user
from vtorque_core.config.request import make_request
from vtorque_core.config.site_file import load_paths
from vtorque_core.live.images import check_pool, root_site
from vtorque_core.node.start.attempt import StartAttempt
from vtorque_core.resources.disk import MountResource
from vtorque_images.pool_commands import list_command

UID = os.getuid() or 1000
IS_OWN = personal._is_own  # the fixture replaces it


@pytest.fixture
def user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the home of a user on a machine that is not set up; this process is not root."""
    monkeypatch.setattr(
        personal, "CONFIG_PATH", tmp_path / "machine.toml"
    )  # this one may be a node
    monkeypatch.setattr(personal, "Paths", lambda: Paths(state=tmp_path / "no-state"))
    account = pwd.struct_passwd(("me", "x", UID, UID, "", str(tmp_path / "home"), "/bin/sh"))
    run = tmp_path / "run"
    run.mkdir(mode=0o700)
    for name in personal.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(run))
    monkeypatch.setattr(pwd, "getpwuid", lambda _: account)
    monkeypatch.setattr(os, "geteuid", lambda: UID)
    monkeypatch.setattr(personal, "_is_own", lambda place: place.is_dir())
    return tmp_path


def test_personal_site_uses_directories_of_the_user(user):
    site, _ = load(personal.CONFIG_PATH, node=False)
    home = user / "home"
    assert site.owner == UID
    assert site.path == home / ".config/vtorque/vtorque.toml"
    assert site.paths.state == home / ".local/state/vtorque"
    assert site.images.pool == home / ".local/share/vtorque/images"
    assert site.paths.run == user / "run/vtorque"
    assert (site.node.libvirt_uri, site.network.kind) == ("qemu:///session", "user")
    assert site.origin("network.kind") == "default"


def test_xdg_variables_change_the_directories(user, monkeypatch):
    for name in ("CONFIG", "STATE", "DATA"):
        monkeypatch.setenv(f"XDG_{name}_HOME", str(user / name))
    site, _ = load(personal.CONFIG_PATH, node=False)
    assert site.path == user / "CONFIG/vtorque/vtorque.toml"
    assert site.paths.state == user / "STATE/vtorque"
    assert site.images.pool == user / "DATA/vtorque/images"
    monkeypatch.setenv("XDG_STATE_HOME", "relative")  # the specification: ignored
    assert load_paths(personal.CONFIG_PATH).state == user / "home/.local/state/vtorque"


def test_config_of_the_user_overrides_personal_defaults_only(user):
    own = personal.config()
    own.parent.mkdir(parents=True)
    own.write_text('[node]\naccel = "tcg"\n[images]\npool = "/pool"\n')
    for named in (personal.CONFIG_PATH, own):
        site, _ = load(named, node=False)
        assert (site.node.accel, site.images.pool) == ("tcg", Path("/pool"))
        assert (site.node.libvirt_uri, site.images.keep) == ("qemu:///session", 0)
        assert site.origin("node.accel") == f"{own}:2"


@pytest.mark.parametrize(
    "text",
    ['[network]\nkind = "bridge"\nsource = "br0"\n', '[networks.hpc]\nsource = "br1"\n'],
    ids=["bridge", "additional-network"],
)
def test_network_that_needs_root_is_refused(user, text):
    own = personal.config()
    own.parent.mkdir(parents=True)
    own.write_text(text)
    with pytest.raises(ConfigError, match="needs root"):
        load(personal.CONFIG_PATH, node=False)


def test_site_of_a_machine_has_no_user_network(tmp_path):
    file = tmp_path / "vtorque.toml"
    file.write_text('[network]\nkind = "user"\n')
    with pytest.raises(ConfigError, match="the node's services"):
        load(file, node=False)


def test_config_of_root_or_by_name_is_not_personal(user, monkeypatch):
    (user / "other.toml").touch()
    assert load(user / "other.toml", node=False)[0].owner == 0
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert not personal.is_personal_path(personal.CONFIG_PATH)
    assert not personal.is_personal_path(personal.config())


def test_first_image_of_a_personal_site_has_a_pool(user):
    """No administrator creates the pool, and an image may be built before the first job."""
    listed = CliRunner().invoke(list_command, obj=personal.CONFIG_PATH)
    assert (listed.exit_code, listed.exception) == (0, None)
    site, _ = root_site(personal.CONFIG_PATH)
    check_pool(site.images.pool)


def test_machine_with_a_config_or_state_directory_has_a_site(user, monkeypatch):
    config_path = user / "vtorque.toml"
    monkeypatch.setattr(personal, "CONFIG_PATH", config_path)
    assert personal.is_personal_path(config_path)
    config_path.touch()
    assert not personal.is_personal_path(config_path)
    config_path.unlink()
    monkeypatch.setattr(personal, "Paths", lambda: Paths(state=user))
    assert not personal.is_personal_path(config_path)


def test_runtime_directory_in_tmp_has_an_unpredictable_name(user, monkeypatch):
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    owners: dict[Path, int] = {}
    monkeypatch.setattr(personal, "_is_own", lambda place: owners.get(place, 0) == UID)
    monkeypatch.setattr(Path, "mkdir", lambda self, **_: owners.setdefault(self, UID))
    os.makedirs(user / "home/.local/state/vtorque")  # noqa: PTH103 - Path.mkdir is replaced
    first = personal.defaults()["paths"]["run"]
    assert re.fullmatch(rf"/tmp/vtorque-{UID}-[0-9a-f]{{16}}/vtorque", first)
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert personal.defaults()["paths"]["run"] == first, "another process uses another directory"
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    owners[Path(first).parent] = UID + 1  # after a reboot, another user created the name
    assert personal.defaults()["paths"]["run"] != first


def test_directories_of_the_user_are_private_whatever_the_umask(user, monkeypatch):
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    before = os.umask(0)
    try:
        personal._runtime(user / "home/new/state/run")
        assert os.umask(0) == 0
    finally:
        os.umask(before)
    for name in ("new", "new/state"):
        assert (user / "home" / name).stat().st_mode & 0o777 == 0o700, name


def test_unwritable_state_directory_is_reported_in_one_line(user, monkeypatch):
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    monkeypatch.setattr(personal, "_is_own", lambda _: False)
    (user / "home").touch()
    with pytest.raises(ConfigError, match=r"home/\.local/state/vtorque: Not a directory"):
        personal.defaults()


@pytest.mark.parametrize("variable", ["CONFIG", "STATE", "DATA", "CACHE"])
def test_directory_that_others_can_change_is_refused(user, monkeypatch, variable):
    """The directories may come from another user's environment, which ``su`` keeps."""
    theirs = user / "theirs"
    theirs.mkdir()
    monkeypatch.setenv(f"XDG_{variable}_HOME", str(theirs))
    load(personal.CONFIG_PATH, node=False)
    theirs.chmod(0o777)
    with pytest.raises(ConfigError, match=rf"chmod go-w .*; or set XDG_{variable}_HOME to a dir"):
        load(personal.CONFIG_PATH, node=False)
    (theirs / "vtorque").mkdir()  # although this one is not writable
    with pytest.raises(ConfigError, match=rf"XDG_{variable}_HOME"):
        load(personal.CONFIG_PATH, node=False)


@pytest.mark.parametrize("variable", ["CONFIG", "STATE", "DATA", "CACHE"])
def test_missing_directory_that_others_can_create_is_refused(user, monkeypatch, variable):
    (user / "shared").mkdir()
    (user / "shared").chmod(0o1777)
    monkeypatch.setenv(f"XDG_{variable}_HOME", str(user / "shared/own"))
    with pytest.raises(
        ConfigError, match=rf"other users could create it; or set XDG_{variable}_HOME"
    ):
        load(personal.CONFIG_PATH, node=False)
    (user / "shared/own").mkdir(mode=0o700)
    load(personal.CONFIG_PATH, node=False)


@pytest.mark.parametrize("variable", ["CONFIG", "CACHE"])
def test_libvirt_directory_that_others_can_create_is_refused(user, monkeypatch, variable):
    """XDG_CONFIG_HOME=/tmp: libvirtd of the user's session would use /tmp/libvirt."""
    (user / "shared/vtorque").mkdir(parents=True)
    (user / "shared/vtorque/vtorque.toml").touch(mode=0o600)
    (user / "shared").chmod(0o1777)
    monkeypatch.setenv(f"XDG_{variable}_HOME", str(user / "shared"))
    with pytest.raises(ConfigError, match=rf"libvirt: does not exist, .*XDG_{variable}_HOME"):
        load(personal.CONFIG_PATH, node=False)
    (user / "shared/libvirt").mkdir(mode=0o700)
    load(personal.CONFIG_PATH, node=False)


def test_runtime_directory_below_a_world_writable_one_is_not_used(user):
    own = user / "others/own"
    own.mkdir(parents=True)
    own.chmod(0o700)
    if os.getuid() == 0:
        os.chown(own, UID, UID)
    assert IS_OWN(own)
    own.parent.chmod(0o777)
    assert not IS_OWN(own)


def test_config_owned_or_writable_by_others_is_refused(user, monkeypatch):
    own = personal.config()
    own.parent.mkdir(parents=True)
    own.write_text("")
    load(personal.CONFIG_PATH, node=False)
    own.chmod(0o622)
    with pytest.raises(ConfigError, match=rf"^{own}: can be written by others"):
        load(own, node=False)
    own.chmod(0o600)
    real = os.lstat

    def lstat(path):
        found = real(path)
        if Path(path) != own:
            return found
        return os.stat_result((*found[:4], UID + 1, *found[5:]))

    monkeypatch.setattr(os, "lstat", lstat)
    with pytest.raises(ConfigError, match=rf"^{own}: is owned by uid {UID + 1}, who could"):
        load(personal.CONFIG_PATH, node=False)


def test_user_without_an_account_gets_one_line(user, monkeypatch):
    def missing(uid):
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", missing)
    for ask in (lambda: load(personal.CONFIG_PATH, node=False), facts_of_user):
        with pytest.raises(ConfigError, match=rf"^uid {UID} has no account on this machine: ask"):
            ask()


def test_libvirt_uses_the_directories_that_were_checked(user, monkeypatch):
    """``su -m`` keeps HOME, and GLib (libvirt) accepts relative paths, unlike the specification."""
    monkeypatch.setenv("HOME", str(user / "theirs"))
    monkeypatch.setenv("XDG_CONFIG_HOME", "relative")
    load(personal.CONFIG_PATH, node=False)
    assert os.environ["HOME"] == str(user / "home")
    assert "XDG_CONFIG_HOME" not in os.environ


def test_libvirt_client_uses_the_checked_runtime_directory(user, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/somebody/elses")
    monkeypatch.setattr(personal, "_is_own", lambda place: str(place) == f"/run/user/{UID}")
    assert load_paths(personal.CONFIG_PATH).run == Path(f"/run/user/{UID}/vtorque")
    assert os.environ["XDG_RUNTIME_DIR"] == f"/run/user/{UID}"


def test_value_that_needs_root_is_refused_with_its_key(user):
    site, plugins = load(personal.CONFIG_PATH, node=False)
    check_options(make_request([("fs_type", "sharedfs")], plugins.options()), site, plugins)
    with pytest.raises(Refused, match=r"^fs_type=ramdisk: needs root, but your personal site"):
        check_options(make_request([("fs_type", "ramdisk")], plugins.options()), site, plugins)


def test_resource_that_needs_root_is_not_acquired(user, monkeypatch):
    site, _ = load(personal.CONFIG_PATH, node=False)
    start = StartAttempt.__new__(StartAttempt)
    start.site, start.deadline, start.acting = site, math.inf, "acme"
    with pytest.raises(Refused, match=r"^mount \(acme\) needs root"):
        start.acquire(MountResource("a", "/b"))
