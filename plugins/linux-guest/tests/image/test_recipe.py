"""Recipes: accepted ones, and every error with its line and key."""

from __future__ import annotations

import os
import tarfile
from pathlib import Path

import pytest

from vtorque_core.api import Refused
from vtorque_linux_guest.image import recipe_files
from vtorque_linux_guest.image.recipe import AddedFile, read
from vtorque_linux_guest.image.recipe_builder import LinuxBuilder

GOOD = """
family = "debian"
suite = "bookworm"
packages = ["gfortran", "libopenmpi-dev"]
sources = ["deb [trusted=yes] http://127.0.0.1:8000/debian bookworm main contrib"]
size = "2G"
commands = ["ldconfig", '''
cd /opt/app
make''']

[application]
source = "app"

[[files]]
target = "/etc/motd"
content = "hello"

[[files]]
target = "/usr/local/bin/run"
source = "tools/run"
mode = "755"
"""
REDHAT = 'family = "redhat"\nsuite = "9"\nsources = ["https://mirror/os"]\nunsigned = true\n'


def written(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "recipe.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_recipe_is_parsed_with_all_its_keys(tmp_path: Path) -> None:
    recipe = read(written(tmp_path, GOOD))
    assert (recipe.family, recipe.suite, recipe.size) == ("debian", "bookworm", 2048)
    assert recipe.kernel == "cloud"
    assert recipe.commands[1] == "cd /opt/app\nmake"
    assert recipe.files == (
        AddedFile("/etc/motd", None, b"hello"),
        AddedFile("/usr/local/bin/run", "tools/run", b"", 0o755),
        AddedFile("/opt/app", "app"),
    )
    assert recipe.directory == tmp_path
    assert read(written(tmp_path, REDHAT)).kernel == "own"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('family = "debian"', 'family = "suse"', "line 2: family 'suse': must be debian or redhat"),
        ('family = "debian"', "family = 3", "line 2: family '3': must be a text"),
        ('family = "debian"', "", "family: must be debian or redhat"),
        ("packages =", "package =", "line 4: package: unknown key; known: family"),
        ("[application]", "[applications]", "line 11: applications: unknown key"),
        ('suite = "bookworm"', 'suite = "../x"', "line 3: suite '../x'"),
        ('suite = "bookworm"', 'suite = "--help"', "line 3: suite '--help'"),
        ('"gfortran"', '"--setup-hook=reboot"', "line 4: packages '--setup-hook=reboot': is not"),
        ('"gfortran"', '"a,b"', "line 4: packages 'a,b'"),
        ('"gfortran"', r'"a\nb"', "line 4: packages .*printable"),
        ('"gfortran"', "7", "line 4: packages '7'"),
        ("deb [trusted=yes] http", "deb [x=$(reboot)] http", "line 5: sources .*deb URL SUITE"),
        ('sources = ["deb', 'sources = ["copy:', "line 5: sources .*deb URL SUITE COMPONENT"),
        ('size = "2G"', 'size = "10E"', "line 6: size '10E'"),
        ('size = "2G"', 'size = "1M"', "line 6: size '1M': must be between 1G and 1T"),
        ('"ldconfig"', r'"a\u0000b"', "line 7: commands .*strings with shell"),
        ('"ldconfig"', '" "', "line 7: commands"),
        ('source = "app"', 'source = "../app"', "line 12: application.source '../app': must be a"),
        ('source = "app"', 'source = "/etc"', "line 12: application.source '/etc'"),
        ('source = "app"', "", "application.source"),
        ('target = "/etc/motd"', 'target = "/../etc"', "line 15: files.target '/../etc'"),
        ('target = "/etc/motd"', 'target = "etc/motd"', "line 15: files.target 'etc/motd'"),
        ('target = "/etc/motd"', r'target = "/etc/a\nb"', "line 15: files.target"),
        ('target = "/etc/motd"', 'target = "/dev/sda"', "line 15: files.target .*files below /dev"),
        ('target = "/etc/motd"', "", "line 14: files.target ''"),
        ('content = "hello"', "", "files.source '/etc/motd': set either source or content"),
        ('source = "tools/run"', 'source = "a/../../b"', "line 20: files.source 'a/../../b'"),
        ('mode = "755"', 'mode = "4755"', "line 21: files.mode '4755'"),
        ('mode = "755"', "mode = 493", "line 21: files.mode '493': must be a text"),
        ('mode = "755"', 'owner = "root"', "line 21: files.owner: unknown key"),
        ('size = "2G"', "size = ", "is not TOML"),
    ],
)
def test_broken_recipe_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in GOOD
    with pytest.raises(Refused, match=message):
        read(written(tmp_path, GOOD.replace(old, new, 1)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (REDHAT.replace("sources", "#"), "redhat family needs the URLs"),
        (REDHAT.replace("unsigned = true", ""), "keys: name the files of the keys"),
        (REDHAT + 'keys = ["../key"]', "line 5: keys '../key'"),
        (REDHAT.replace("https", "ftp"), "line 3: sources 'ftp://mirror/os'"),
        (REDHAT + 'kernel = "vmlinuz"', "line 5: kernel 'vmlinuz': must be one of cloud"),
        (REDHAT + 'kernel = "disk"', "line 5: kernel 'disk': disk needs the debian family"),
        (b"\xff\xfe", "is not TOML"),
        (b"a" * (1 << 21), "larger than 1048576 bytes"),
    ],
)
def test_invalid_recipe_is_refused_with_the_reason(
    tmp_path: Path, text: str | bytes, message: str
) -> None:
    with pytest.raises(Refused, match=message):
        read(written(tmp_path, text))


def test_builder_names_missing_and_unknown_options(tmp_path: Path) -> None:
    for arguments, message in (
        ({}, "-o recipe=FILE"),
        ({"recipe": "/nonexistent/r.toml"}, "No such file"),
        ({"receipt": "x"}, "has no option receipt"),
    ):
        with pytest.raises(Refused, match=message):
            LinuxBuilder().build(arguments, tmp_path, lambda text: None)
    assert list(tmp_path.iterdir()) == []


def test_files_are_packed_with_their_directories(tmp_path: Path) -> None:
    app = tmp_path / "app"
    (app / "bin").mkdir(parents=True)
    (app / "bin/tool").write_text("#!/bin/sh\n")
    (app / "bin/tool").chmod(0o4775)
    (app / "link").symlink_to("bin/tool")
    packed = tmp_path / "added.tar"
    added = [AddedFile("/opt/app", "app"), AddedFile("/etc/motd", None, b"hi", 0o600)]
    recipe_files.pack(tmp_path, added, packed, 64)
    with tarfile.open(packed) as archive:
        found = {i.name: (i.mode, i.type, i.linkname, i.uid, i.mtime) for i in archive}
    regular, link, folder = tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.DIRTYPE
    assert found == {
        "opt/app": (0o755, folder, "", 0, 0),
        "opt/app/bin": (0o755, folder, "", 0, 0),
        "opt/app/bin/tool": (0o755, regular, "", 0, 0),
        "opt/app/link": (0o777, link, "bin/tool", 0, 0),
        "etc/motd": (0o600, regular, "", 0, 0),
    }


def test_links_out_of_the_recipe_directory_are_refused(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (tmp_path / "secret").write_text("secret")
    (home / "file").symlink_to("/etc/shadow")
    (home / "dir").symlink_to(tmp_path)
    (home / "app").mkdir()
    os.mkfifo(home / "app/fifo")
    (home / "large").write_bytes(bytes(2 << 20))
    for source, message in (
        ("file", "symbolic link"),
        ("dir/secret", "symbolic link"),
        ("missing", "No such file"),
        ("app", "neither file nor directory"),
        ("large", "larger than the image's size"),
    ):
        with pytest.raises(Refused, match=message):
            recipe_files.pack(home, [AddedFile("/x", source)], tmp_path / "t.tar", 1)
    with pytest.raises(Refused, match="symbolic link"):
        recipe_files.read_below(home, "file")


def test_recipes_of_the_manual_are_parsed():
    recipes = sorted((Path(__file__).parents[4] / "doc/recipes").glob("*.toml"))
    assert recipes
    for path in recipes:
        assert read(path).packages
