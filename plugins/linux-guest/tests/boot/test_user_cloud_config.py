"""The user's cloud-config: supported content and its effect, and hostile files."""

from __future__ import annotations

import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sample_guests import SHELLS, USER
from sample_guests import USER_CLOUD_CONFIG as TEXT
from vtorque_core.api import FileData, Refused
from vtorque_core.api.guest_context import GuestFile, Package, RootCommand
from vtorque_linux_guest.boot import user_cloud_config
from vtorque_linux_guest.boot.user_cloud_config import MODULES, UserConfig, UserFile

CONFIG = UserConfig(
    ("gdb", "g++"),
    (
        UserFile("/home/alice/.config/x", b"it's\n", 0o600, False),
        UserFile("/home/alice/b", b"\0\1\2", 0o644, True),
    ),
    ("cd /; x=1", ("touch", "a b", "3")),
)


def read(text: str | bytes) -> UserConfig:
    return user_cloud_config.read(FileData("x", text.encode() if isinstance(text, str) else text))


def made(config: UserConfig, allowed=MODULES, kin="debian"):
    return list(user_cloud_config.items(config, allowed, kin, USER, "/home/alice"))


def test_supported_modules_are_parsed() -> None:
    assert read(TEXT) == CONFIG
    assert CONFIG.modules == MODULES


BAD = {
    "": "does not begin with #cloud-config",
    "\ufeff#cloud-config\n": "does not begin with #cloud-config, but with a byte order mark",
    "#cloud-config": "is not a YAML mapping of modules",
    "#cloud-config\n- a": "is not a YAML mapping of modules",
    "#cloud-config\nusers: []": "users: users may only use packages, write_files, runcmd",
    "#cloud-config\nmerge_how: x": "merge_how: users may only",
    "#cloud-config\na: &x [1]\nb: *x": "line 2: anchors and aliases are not allowed",
    "#cloud-config\nruncmd: [!!python/name:os.system x]": "line 2: tags",
    "#cloud-config\nruncmd: []\nruncmd: []": "line 3: a key is duplicate or not a string",
    "#cloud-config\n? [a]\n: b": "not a string",
    "#cloud-config\nruncmd: " + "[" * 3000: "nested too deeply",
    "#cloud-config\nruncmd: [" + "a," * 201 + "]": "is not a list of at most 200 items",
    "#cloud-config\nruncmd: [" + "a," * 11000 + "]": "too long",
    "#cloud-config\nruncmd: {": "line 2: ",
    "#cloud-config\nruncmd: [[]]": "runcmd: a command is empty",
    "#cloud-config\nruncmd: [true]": "True is not a string: put it in quotes",
    "#cloud-config\nruncmd: [[sleep, 5]]": "5 is not a string: put it in quotes",
    '#cloud-config\nruncmd: ["a\\0b"]': "is not a string: put it in quotes",
    "#cloud-config\npackages: ['-o=x']": "packages: '-o=x' is not a valid package name",
    "#cloud-config\npackages: ['auditd-']": "packages: 'auditd-' is not a valid package name",
    "#cloud-config\npackages: [x.rpm]": "packages: 'x.rpm' is not a valid package name",
    "#cloud-config\npackages: [./x.deb]": "is not a valid package name",
    "#cloud-config\npackages: [[gdb, 1.0]]": "is not a string: put it in quotes",
    "#cloud-config\nwrite_files: [x]": "write_files: an item lacks path or content",
    "#cloud-config\nwrite_files: [{path: /x, content: y, owner: root}]": "has a key other than",
    "#cloud-config\nwrite_files: [{path: x, content: y}]": "not an absolute path",
    "#cloud-config\nwrite_files: [{path: /a/../b, content: y}]": "not an absolute path",
    '#cloud-config\nwrite_files: [{path: "/a\\nb", content: y}]': "not an absolute path",
    "#cloud-config\nwrite_files: [{path: /x, content: y, permissions: 0644}]": "420 is not a s",
    "#cloud-config\nwrite_files: [{path: /x, content: y, permissions: '4755'}]": "are invalid",
    "#cloud-config\nwrite_files: [{path: /x, content: y, encoding: gz+b64}]": "must be one of",
    "#cloud-config\nwrite_files: [{path: /x, content: '*', encoding: b64}]": "base64",
}


@pytest.mark.parametrize("text", BAD)
def test_unsupported_content_is_refused(text: str) -> None:
    with pytest.raises((ValueError, Refused)) as refused:
        user_cloud_config._parse_answer(user_cloud_config.parse(text.encode()))
    assert BAD[text] in str(refused.value)


@pytest.mark.parametrize("content", [b"#cloud-config\nruncmd:\n- echo caf\xe9\n", b"\xff\xfe#"])
def test_text_that_is_not_utf8_is_refused(content: bytes) -> None:
    """If invalid bytes were replaced, the guest would run another command."""
    with pytest.raises(ValueError, match=r"^line [13] is not UTF-8$"):
        list(user_cloud_config.parse(content))


def test_error_of_the_parser_is_the_refusal() -> None:
    with pytest.raises(
        Refused, match=r"^your cloud-config: users: users may only use packages, write_files"
    ):
        read("#cloud-config\nusers: []\n")


@given(st.one_of(st.binary(), st.text("#[]{}&*!-:?,'\"|>%@` \nax01")))
def test_any_bytes_are_parsed_or_raise_value_error(text) -> None:
    data = b"#cloud-config\n" + (text.encode() if isinstance(text, str) else text)
    try:
        list(user_cloud_config.parse(data))
    except ValueError as error:
        assert str(error)


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ([b"p-o"], "valid package"), ([b"w/x\0" + b"9\0"], "permissions"), ([b"w"], "absolute"),
        ([b"s\xff"], "not UTF-8"), ([b"w\xff\0000\0x"], "not UTF-8"), ([b"sa\0b"], "a NUL"),
    ],
)  # fmt: skip
def test_root_checks_each_value_from_the_parser(parts, says) -> None:
    with pytest.raises(Refused, match=says):
        user_cloud_config._parse_answer(parts)


def test_modules_outside_the_site_limit_are_refused() -> None:
    with pytest.raises(Refused, match=r"packages is not allowed here \(limit: runcmd\)"):
        made(CONFIG, allowed=("runcmd", "users"))
    assert made(UserConfig(commands=("a",)), allowed=("runcmd",))


def test_files_must_be_below_the_home_and_need_cloud_init() -> None:
    for path in ("/etc/passwd", "/home/alicex/y", "/home/alice"):
        with pytest.raises(Refused, match="is not below your home"):
            made(UserConfig(files=(UserFile(path, b"", 0o644, False),)))
    for kin in ("micro", None):
        with pytest.raises(Refused, match="choose an image of a Debian or RedHat family"):
            made(CONFIG, kin=kin)


@pytest.mark.parametrize("shell", SHELLS, ids=lambda shell: shell[0])
def test_user_files_and_commands_are_applied_in_the_guest(tmp_path, shell) -> None:
    home = tmp_path / "it's"
    home.mkdir()
    files = tuple(
        UserFile(str(home / f.path[12:]), f.content, f.mode, f.append) for f in CONFIG.files
    )
    commands = ("x='a  b'", 'echo "$x$(pwd)"; false || :', ("echo", "$x", "'"), "false", "echo no")
    found = list(
        user_cloud_config.items(UserConfig((), files, commands), MODULES, "redhat", USER, str(home))
    )
    *data, script, become = [item for item in found if isinstance(item, GuestFile)]
    assert [(item.owner, item.mode) for item in data] == [("job", 0o400)] * 2
    assert (script.owner, become.owner, become.mode) == ("job", "root", 0o700)
    assert b"setpriv --reuid=1000 --regid=1000 --init-groups -- env -i " in become.content
    assert found[-1] == RootCommand(("/bin/sh", become.path))
    text = script.content.decode()
    for item in data:
        place = tmp_path / item.path.rpartition("/")[2]
        place.write_bytes(item.content)
        text = text.replace(item.path, str(place))
    (home / "b").write_bytes(b"-")
    done = subprocess.run([*shell, "-c", text], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, f"a  b{home}\n$x '\n"), done.stderr
    assert (home / "b").read_bytes() == b"-\0\1\2"
    assert (home / ".config/x").read_bytes() == b"it's\n"
    assert (home / ".config/x").stat().st_mode & 0o777 == 0o600


def test_packages_get_the_family_of_the_image() -> None:
    config = UserConfig(packages=("gdb",))
    assert made(config) == [Package("gdb", "debian")]
    assert made(config, kin="redhat") == [Package("gdb", "redhat")]
