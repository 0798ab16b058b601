"""Real programs, made by a real compiler."""

import subprocess
from pathlib import Path

import pytest
from vtorque_osv import elf

from vtorque_core.api import Refused

SOURCE = "int answer(void);\nint main(void) { return answer(); }\n"


def compile_(tmp_path, name, source, *options):
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(
        ["gcc", "-x", "c", "-", "-x", "none", "-o", path, *options],
        input=source.encode(),
        check=True,
    )
    return path


@pytest.fixture
def library(tmp_path):
    """A library that needs another one in its own directory, by $ORIGIN."""
    inner = compile_(tmp_path, "lib/libinner.so", "int inner(void) { return 42; }", "-shared",
                     "-fPIC", "-Wl,-soname,libinner.so")  # fmt: skip
    return compile_(
        tmp_path, "lib/libanswer.so", "int inner(void); int answer(void) { return inner(); }",
        "-shared", "-fPIC", "-Wl,-soname,libanswer.so", str(inner), "-Wl,-rpath,$ORIGIN",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("options", "pie"),
    [
        (["-pie", "-fPIE"], True),
        (["-no-pie"], False),
        (["-static-pie", "-fPIE"], True),
        (["-static", "-no-pie"], False),
        (["-shared", "-fPIC"], True),
    ],
)
def test_kind_of_a_program_is_detected_and_its_architecture_checked(tmp_path, options, pie):
    found = elf.read(compile_(tmp_path, "p", "int main(void) { return 0; }", *options))
    assert (found.pie, found.arch) == (pie, "x86_64")
    elf.check_program(found, "x86_64")
    with pytest.raises(Refused, match="but the loader for aarch64"):
        elf.check_program(found, "aarch64")


@pytest.mark.parametrize("base", ["0x40200000", "0x3ffff000"])
def test_program_at_addresses_of_osv_is_refused(tmp_path, base):
    source = "char big[1 << 20]; int main(void) { return big[5]; }"
    program = compile_(tmp_path, "p", source, "-no-pie", f"-Wl,-Ttext-segment={base}")
    with pytest.raises(Refused, match="link it with -pie"):
        elf.check_program(elf.read(program), "x86_64")


def test_libraries_are_found_with_their_dependencies(tmp_path, library):
    program = compile_(tmp_path, "p", SOURCE, str(library), f"-Wl,-rpath,{library.parent}")
    found = elf.libraries([elf.read(program)])
    assert {name: path.name for name, path in found.items()} == {
        "libanswer.so": "libanswer.so",
        "libinner.so": "libinner.so",
    }


def test_libraries_are_searched_in_recipe_directories(tmp_path, library):
    program = compile_(tmp_path, "p", SOURCE, str(library))
    with pytest.raises(
        Refused, match=r"needs the library libanswer.so, which is missing on this machine"
    ):
        elf.libraries([elf.read(program)])
    assert set(elf.libraries([elf.read(program)], [library.parent])) == {
        "libanswer.so",
        "libinner.so",
    }
    assert elf.libraries([elf.read(program)], have=["libanswer.so"]) == {}


def test_system_library_of_a_program_is_found(tmp_path):
    zlib = next(Path("/usr/lib").rglob("libz.so.1"), None)
    assert zlib is not None
    source = "char *zlibVersion(void); int main(void) { return !zlibVersion(); }"
    program = compile_(tmp_path, "p", source, str(zlib.resolve()))
    assert set(elf.libraries([elf.read(program)])) == {"libz.so.1"}


def test_other_file_is_not_elf(tmp_path):
    (tmp_path / "text").write_text("hello")
    assert elf.read(tmp_path / "text") is None


@pytest.mark.parametrize("size", [4, 20, 64, 1000])
def test_broken_elf_file_is_refused(tmp_path, size):
    whole = compile_(tmp_path, "p", "int main(void) { return 0; }").read_bytes()
    (tmp_path / "cut").write_bytes(whole[:size])
    with pytest.raises(Refused, match="is an invalid ELF file"):
        elf.read(tmp_path / "cut")


@pytest.mark.parametrize("field", [32, 40])  # elf(5): e_phoff, e_shoff
def test_offsets_beyond_any_file(tmp_path, field):
    content = bytearray(compile_(tmp_path, "p", "int main(void) { return 0; }").read_bytes())
    content[field + 7] = 0x7F
    (tmp_path / "bad").write_bytes(content)
    with pytest.raises(Refused, match="is an invalid ELF file"):
        elf.read(tmp_path / "bad")
