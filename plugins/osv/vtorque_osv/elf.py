"""Check programs for OSv, and find the libraries that they need.

Nothing is executed. ELF files are parsed (elf(5), gabi "Dynamic Linking"), and libraries are
searched as in ld.so(8): RPATH, RUNPATH, the system's cache.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from elftools.common.exceptions import ELFError
from elftools.elf.dynamic import DynamicSection, DynamicTag
from elftools.elf.elffile import ELFFile

from vtorque_core.api import Refused, run_tool

ARCHES = {"EM_X86_64": "x86_64", "EM_AARCH64": "aarch64"}
# Libraries that OSv's kernel implements (core/elf.cc, create_main_program).
SUPPLIED = frozenset({
    "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1", "libc.musl-x86_64.so.1",
    "ld-musl-x86_64.so.1", "libresolv.so.2", "libc.so.6", "libm.so.6", "libpthread.so.0",
    "libdl.so.2", "librt.so.1", "libstdc++.so.6", "libaio.so.1", "libxenstore.so.3.0",
    "libcrypt.so.1", "libutil.so",
})  # fmt: skip
# Besides OSError, pyelftools raises these for invalid offsets.
_BROKEN = (
    ELFError, ValueError, KeyError, IndexError, AssertionError, AttributeError, OverflowError,
)  # fmt: skip
_CACHED = re.compile(r"^\s*(\S+) \(([^)]*)\) => (/\S+)$")


KERNEL_BASE = 0x40000000
"""Lowest address that OSv uses: its kernel's (0x40200000, conf/kconfig), rounded down to a GiB."""


@dataclass(frozen=True)
class Elf:
    """Properties of an ELF file. ``end`` is its highest address."""

    path: Path
    arch: str
    pie: bool
    end: int
    needed: tuple[str, ...]
    search: tuple[str, ...]


def read(path: Path) -> Elf | None:
    """Parse an ELF file; None for another file. Raises Refused for a broken ELF file."""
    with path.open("rb") as file:
        if file.read(4) != b"\x7fELF":
            return None
        try:
            elf = ELFFile(file)
            loaded = [s for s in elf.iter_segments() if s["p_type"] == "PT_LOAD"]
            needed, search = _dynamic(elf)
            return Elf(
                path=path,
                arch=ARCHES.get(elf["e_machine"], str(elf["e_machine"])),
                pie=elf["e_type"] == "ET_DYN",
                end=max((s["p_vaddr"] + s["p_memsz"] for s in loaded), default=0),
                needed=needed,
                search=search,
            )
        except OSError as error:
            if error.errno != errno.EINVAL:  # lseek(2) with an offset beyond the maximum
                raise
            raise Refused(f"{path}: is an invalid ELF file: an offset is wrong") from None
        except _BROKEN as error:
            raise Refused(f"{path}: is an invalid ELF file: {error}") from None


def _dynamic(elf: ELFFile) -> tuple[tuple[str, ...], tuple[str, ...]]:
    needed: list[str] = []
    search: list[str] = []
    for section in elf.iter_sections():
        if isinstance(section, DynamicSection):
            for tag in section.iter_tags():
                if tag.entry.d_tag == "DT_NEEDED":
                    needed.append(_text(tag, "needed"))
                elif tag.entry.d_tag in ("DT_RPATH", "DT_RUNPATH"):
                    search += _text(tag, tag.entry.d_tag.removeprefix("DT_").lower()).split(":")
    return tuple(needed), tuple(search)


def _text(tag: DynamicTag, name: str) -> str:
    return str(getattr(tag, name))


def check_program(elf: Elf, arch: str) -> None:
    """Raise Refused if a program is for another architecture, or overlaps OSv's addresses."""
    if elf.arch != arch:
        raise Refused(f"{elf.path}: is built for {elf.arch}, but the loader for {arch}")
    if not elf.pie and elf.end > KERNEL_BASE:
        raise Refused(
            f"{elf.path}: is linked to fixed addresses up to {elf.end:#x}, which OSv occupies",
            limit=f"{KERNEL_BASE:#x}",
            fix="link it with -pie",
        )


def libraries(
    programs: Iterable[Elf], here: Sequence[Path] = (), have: Iterable[str] = ()
) -> Mapping[str, Path]:
    """Return all libraries that the programs need, directly or indirectly, by name.

    ``here`` are directories to search first; ``have`` are names that the image already contains.
    Raises Refused with the program's name if a library is missing.
    """
    found: dict[str, Path] = {}
    known = set(have) | SUPPLIED
    waiting = list(programs)
    while waiting:
        elf = waiting.pop()
        for name in elf.needed:
            if name in known:
                continue
            path = _find(name, elf, here)
            if path is None:
                raise Refused(
                    f"{elf.path} needs the library {name}, which is missing on this machine",
                    fix="install it, or add its directory to libdirs",
                )
            known.add(name)
            found[name] = path.resolve()
            library = read(found[name])
            if library is not None:
                waiting.append(library)
    return found


def _find(name: str, elf: Elf, here: Sequence[Path]) -> Path | None:
    origin = str(elf.path.resolve().parent)
    own = [Path(re.sub(r"\$ORIGIN|\$\{ORIGIN\}", origin, part)) for part in elf.search if part]
    for directory in (*here, *own):
        path = directory / name
        if path.is_file() and _has_arch(path, elf.arch):
            return path
    return next((p for p in _cache().get(name, ()) if p.is_file() and _has_arch(p, elf.arch)), None)


def _has_arch(path: Path, arch: str) -> bool:
    found = read(path)
    return found is not None and found.arch == arch


@cache
def _cache() -> Mapping[str, tuple[Path, ...]]:
    known: dict[str, tuple[Path, ...]] = {}
    for line in run_tool("ldconfig", "-p").splitlines():
        match = _CACHED.match(line)
        if match is not None:
            known[match[1]] = (*known.get(match[1], ()), Path(match[3]))
    return known
