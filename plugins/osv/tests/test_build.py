"""The builder, and accepted and refused recipes."""

import struct
import subprocess
from pathlib import Path

import pytest
from vtorque_osv import recipe
from vtorque_osv.build import OsvBuilder

from rofs_reader import read_back
from vtorque_core.api import Refused


@pytest.fixture(scope="session")
def prog(tmp_path_factory):
    """Return a program as gcc makes it."""
    top = tmp_path_factory.mktemp("prog")
    (top / "p.c").write_text("int main(void) { return 0; }")
    subprocess.run(["gcc", "-o", top / "prog", top / "p.c"], check=True)
    return (top / "prog").read_bytes()


@pytest.fixture
def src(tmp_path, prog):
    """A directory with a double of the loader, a program and some data."""
    for name in ("prog", "loader.elf"):
        (tmp_path / name).write_bytes(prog)
    (tmp_path / "prog").chmod(0o755)
    (tmp_path / "data/deep").mkdir(parents=True)
    (tmp_path / "data/deep/file").write_text("text")
    (tmp_path / "data/link").symlink_to("deep/file")
    (tmp_path / "staging").mkdir()
    return tmp_path


def build(here, **arguments):
    return OsvBuilder().build(arguments, here / "staging", lambda _: None)


def files(here):
    data = (here / "staging/disk.raw").read_bytes()
    first = struct.unpack_from("<I", data, 0x1CE + 8)[0]
    return read_back(data[first * 512 :])


RECIPE = """
loader = "loader.elf"
mounts = ["/data", "/home/ada"]
min_ram = "96M"
[files]
"/bin/prog" = "prog"
"/share" = "data"
[commands]
run = '/bin/prog "a b"'
[env]
OMP_NUM_THREADS = "2"
NAMES = "a b"
"""


def test_image_is_built_from_a_recipe(src):
    (src / "r.toml").write_text(RECIPE)
    built = build(src, recipe=str(src / "r.toml"))
    assert (built.guest_type, built.distro, built.arch) == ("osv", "OSV", "x86_64")
    assert (built.disk, built.disk_format, built.kernel) == ("disk.raw", "raw", "loader.elf")
    assert built.min_ram_mib == 96
    assert built.cmdline == "--rootfs=rofs --env=OMP_NUM_THREADS=2 --env=NAMES=a\\ b"
    assert built.labels == {"command.run": '/bin/prog "a b"', "mounts": "/data,/home/ada"}
    found = files(src)
    assert found[b"/bin/prog"] == (src / "prog").read_bytes()
    assert found[b"/share/deep/file"] == b"text"
    assert found[b"/share/link"] == (b"deep/file",)
    assert found[b"/home/ada"] is None
    assert b"rofs" in found[b"/etc/fstab"]
    assert (src / "staging/loader.elf").read_bytes() == (src / "loader.elf").read_bytes()


def test_root_share_is_built_with_its_directory(src):
    (src / "r.toml").write_text(RECIPE)
    (src / "prog").chmod(0o700)
    (src / "data/deep/file").chmod(0o600)
    built = build(
        src,
        recipe=str(src / "r.toml"),
        root_share="sim",
        root_directory=str(src / "root"),
    )
    assert (built.disk, built.kernel) == (None, "loader.elf")
    assert built.cmdline.startswith("--rootfs=virtiofs --env=")
    assert built.labels["root"] == "sim"
    assert [path.name for path in (src / "staging").iterdir()] == ["loader.elf"]
    root = src / "root"
    assert (root / "bin/prog").read_bytes() == (src / "prog").read_bytes()
    assert (root / "share/link").readlink() == Path("deep/file")
    assert b" / " not in (root / "etc/fstab").read_bytes()
    assert {"dev", "proc", "sys", "tmp", "data", "home"} <= {p.name for p in root.iterdir()}
    modes = {name: (root / name).stat().st_mode & 0o777 for name in ("bin/prog", "share/deep/file")}
    assert modes == {"bin/prog": 0o755, "share/deep/file": 0o644}
    assert all(p.stat().st_mode & 0o777 == 0o755 for p in (root, *root.rglob("*")) if p.is_dir())
    with pytest.raises(Refused, match="exists, and guests may be using it: name a"):
        build(src, recipe=str(src / "r.toml"), root_share="sim", root_directory=str(root))
    assert sorted(p.name for p in src.iterdir() if p.name.startswith(".")) == []


def test_existing_root_share_is_used(src):
    loader = str(src / "loader.elf")
    built = build(src, loader=loader, root_share="sim", **{"command:run": "/bin/x 1"})
    assert (built.disk, built.labels) == (None, {"root": "sim", "command.run": "/bin/x 1"})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"root_share": "../x"}, "must be the name of a share"),
        ({"root_share": "s", "file:/p": "/bin/true"}, "needs root_directory"),
        ({"root_directory": "/x/y"}, "root_directory: must be a path, and"),
    ],
)
def test_contradicting_root_share_options_are_refused(src, options, message):
    with pytest.raises(Refused, match=message):
        build(src, loader=str(src / "loader.elf"), **options)


def test_root_directory_that_others_can_write_is_refused(src, monkeypatch):
    (src / "open/mine").mkdir(parents=True)
    (src / "open").chmod(0o777)
    loader = str(src / "loader.elf")
    for target in ("open/root", "open/mine/root"):
        with pytest.raises(Refused, match="users other than root can write"):
            build(src, loader=loader, root_share="s", root_directory=str(src / target))
    (src / "open/mine/r.toml").write_text(
        f'loader = "{loader}"\nroot_share = "s"\nroot_directory = "root"\n'
    )
    monkeypatch.chdir(src / "open/mine")
    with pytest.raises(Refused, match="users other than root can write"):
        build(src, recipe="r.toml")
    assert [path.name for path in (src / "open").rglob("*")] == ["mine", "r.toml"]


def test_options_override_the_recipe(src):
    (src / "r.toml").write_text(RECIPE)
    built = build(
        src, recipe=str(src / "r.toml"), **{"env:NAMES": "x", "command:run": "/bin/prog"},
        min_ram="64M", mounts="/m",
    )  # fmt: skip
    assert "--env=NAMES=x" in built.cmdline
    assert built.labels == {"command.run": "/bin/prog", "mounts": "/m"}
    assert built.min_ram_mib == 64


def test_image_that_boots_from_its_disk_is_built(src):
    (src / "loader.img").write_bytes(bytes(510) + b"\x55\xaa" + bytes(5000))
    built = build(src, loader=str(src / "loader.img"), **{"file:/prog": str(src / "prog")})
    assert built.kernel is None
    assert files(src)[b"/prog"] == (src / "prog").read_bytes()


def test_parts_of_osv_become_labels(src):
    for name in ("libhttpserver-api.so", "usr/mgmt/cloud-init.so"):
        path = src / "osv" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    built = build(src, loader=str(src / "loader.elf"), **{"file:/": str(src / "osv")})
    assert built.labels == {"rest": "true", "cloud-init": "true"}


def test_build_is_reproducible(src):
    (src / "r.toml").write_text(RECIPE)
    build(src, recipe=str(src / "r.toml"))
    first = (src / "staging/disk.raw").read_bytes()
    build(src, recipe=str(src / "r.toml"))
    assert (src / "staging/disk.raw").read_bytes() == first


BAD = [
    ("", "loader: must be"),
    ("loader = 3", "loader: must be"),
    ("loader = [", "recipe"),
    ('loader = "l"\nspeed = 1', "speed: unknown; known:"),
    ('loader = "l"\n[files]\n"/a/../b" = "x"', "without '..'"),
    ('loader = "l"\n[files]\n"rel" = "x"', "must be an absolute path"),
    ('loader = "l"\n[files]\n"/a\\nb" = "x"', "must be an absolute path"),
    ('loader = "l"\nfiles = 3', "files: must be a table of strings"),
    ('loader = "l"\nmounts = "x"', "mounts: must be a list of strings"),
    ('loader = "l"\nmounts = ["/a,b"]', "mounts: a path contains ',', or"),
    ('loader = "l"\nmin_ram = "lots"', "min_ram=lots"),
    ('loader = "l"\n[commands]\n"a b" = "/x"', "a name may have letters, digits, '_',"),
    ('loader = "l"\n[commands]\nx = "cd /"', "commands.x: line 1"),
    ('loader = "l"\n[commands]\nx = "/a; /b"', "must run exactly one program"),
    ('loader = "l"\n[commands]\nx = "/a ' + "y" * 300 + '"', "is longer than 255 characters"),
    (
        'loader = "l"\n[env]\nX = "a\\nb"',
        "env: X is reserved, or has a value that OSv does not support",
    ),
    (
        'loader = "l"\n[env]\nPATH = "/bin"',
        "env: PATH is reserved, or has a value that OSv does not support",
    ),
]


@pytest.mark.parametrize(("text", "why"), BAD)
def test_bad_recipes_are_refused(src, text, why):
    (src / "r.toml").write_text(text)
    with pytest.raises(Refused) as refused:
        build(src, recipe=str(src / "r.toml"))
    assert why in str(refused.value)
    assert not list((src / "staging").iterdir())


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"loader": "/no/such"}, "/no/such: No such file"),
        ({"recipe": "/no/such"}, "recipe /no/such: No such file"),
        (
            {"speed": "1"},
            "option speed: unknown; known: recipe, loader, min_ram, mounts, libdirs, root_share",
        ),
        ({"file:/x": "/no/such"}, "/no/such: No such file"),
        ({"file:/x": "/dev/null"}, "/dev/null: is not a file, directory or link"),
        ({"command:x": "/prog"}, "/prog is not among the image's files"),
    ],
)
def test_bad_options_are_refused(src, arguments, why):
    with pytest.raises(Refused) as refused:
        build(src, **{"loader": str(src / "loader.elf"), **arguments})
    assert why in str(refused.value)


def test_recipe_above_1_mib_is_refused(src):
    (src / "r.toml").write_text("#" * (recipe.MAX_RECIPE + 1))
    with pytest.raises(Refused, match="is larger than 1 MiB"):
        build(src, recipe=str(src / "r.toml"))
