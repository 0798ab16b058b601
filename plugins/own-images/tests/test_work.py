"""The directory that guests of an own image get instead of the home."""

from __future__ import annotations

from pathlib import Path

import pytest

from vtorque_core.api import Refused
from vtorque_core.api.guest_plan import Share
from vtorque_own_images.plugin import WORK
from vtorque_own_images.work import choose_directory, shares

HOME = Share("home", "/home/ada", "/home/ada", user_owned=True)
DATA = Share("data", "/data", "/data", readonly=True)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Return a home that is reached by a link, with a directory and a link out of it."""
    (tmp_path / "real/project").mkdir(parents=True)
    (tmp_path / "real/file").touch()
    (tmp_path / "real/out").symlink_to("/usr")
    (tmp_path / "ada").symlink_to("real")
    return tmp_path / "ada"


@pytest.mark.parametrize(
    ("value", "cwd"),
    [("", "project"), ("project", ""), ("./project", ""), ("../project", "project")],
)
def test_directory_below_home_has_the_path_of_the_account(home: Path, value: str, cwd: str) -> None:
    for top in (home, home.resolve()):
        assert choose_directory(value, home, top / cwd) == str(home / "project")


def test_whole_home_is_explicit(home: Path) -> None:
    assert choose_directory("home", home, home) == "home"
    assert shares("home", "/home/ada", [HOME, DATA]) == [HOME, DATA]


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("", "is your home"),
        (".", "is your home"),
        ("/usr", "is not below your home"),
        ("out", "is not below your home"),
        ("missing", "does not exist"),
        ("file", "is not a directory"),
        ("~nobody-has-this-name/x", "does not exist"),
    ],
)
def test_other_directory_is_refused_with_the_fix(home: Path, value: str, why: str) -> None:
    with pytest.raises(Refused, match=why) as refused:
        choose_directory(value, home, home)
    assert "-vm work=home" in str(refused.value)


@pytest.mark.parametrize("value", ["project/data", "", "data", "project/../project/data/.", "~"])
def test_directory_that_an_earlier_guest_replaced_by_a_link_is_refused(
    home: Path, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / ".ssh").mkdir()
    (home / "project/data").symlink_to("../.ssh")
    shown = {"": "project/data", "data": "project"}.get(value, ".")
    monkeypatch.chdir(home / shown)
    monkeypatch.setenv("PWD", str(home / shown))  # as a shell sets it
    monkeypatch.setenv("HOME", str(home / "project/data"))
    with pytest.raises(Refused, match=r"contains a symbolic link to .*/\.ssh: name the directory"):
        choose_directory(value, home)
    monkeypatch.chdir(home / ".ssh")
    monkeypatch.setenv("PWD", str(home / "project"))  # of a program that did not change it
    assert choose_directory("", home) == str(home / ".ssh")


def test_directory_replaces_only_the_home() -> None:
    found = shares("/home/ada/project", "/home/ada", [HOME, DATA])
    work = Share("own-work", "/home/ada/project", "/home/ada/project", user_owned=True)
    assert found == [work, DATA]


@pytest.mark.parametrize("source", ["/home", "/home/ada", "/"])
def test_directory_replaces_every_share_that_contains_the_home(source: str) -> None:
    other = Share("users", source, "/users")
    work = Share("own-work", "/home/ada/project", "/home/ada/project")
    assert shares("/home/ada/project", "/home/ada", [other, DATA]) == [work, DATA]
    found = shares("/home/ada/project", "/home/ada", [HOME, other])
    assert found == [Share(work.name, work.source, work.target, user_owned=True)]


@pytest.mark.parametrize(
    "value", ["", "/home/ada", "/home/ada/", "/home/ada/../eve", "/home/adam", "/etc", "project"]
)
def test_untrusted_directory_outside_home_is_refused(value: str) -> None:
    with pytest.raises(Refused, match="not a directory below your home"):
        shares(value, "/home/ada", [HOME])


@pytest.mark.parametrize("value", ["home", "/home/ada/project"])
@pytest.mark.parametrize("name", ["home", "data"])
def test_share_that_the_guest_mounts_by_nfs_is_refused(value: str, name: str) -> None:
    share = Share(name, "server:/export", "/data", kind="nfs")
    with pytest.raises(Refused, match=f"share {name} uses NFS"):
        shares(value, "/home/ada", [HOME, share])


@pytest.mark.parametrize("value", ["a\nb", "x" * 1025])
def test_unprintable_directory_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match="control character or more than 1024 bytes"):
        WORK.parse(value)
