"""Write an initramfs: a reproducible cpio archive of given files.

The format is "newc" (Documentation/driver-api/early-userspace/buffer-format.rst of the kernel).
Entries are sorted; times and owners are zero.
"""

from __future__ import annotations

import gzip
import lzma
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from vtorque_core.api import HostFault, Refused
from vtorque_linux_guest.image.kernel import KernelPackage

MODULES = "lib/modules"
_MODULE_SUFFIXES = (".ko", ".ko.xz")


@dataclass
class InitramfsTree:
    """The files of an initramfs. ``entries`` maps a path to mode (with file type) and content."""

    entries: dict[str, tuple[int, bytes]] = field(
        default_factory=lambda: {".": (stat.S_IFDIR | 0o755, b"")}  # the kernel's default is 1777
    )

    def directory(self, path: str, mode: int = 0o755) -> None:
        """Add a directory and its parents."""
        parent = str(Path(path).parent)
        if parent != "." and parent not in self.entries:
            self.directory(parent)
        self.entries[path] = (stat.S_IFDIR | mode, b"")

    def file(self, path: str, content: bytes, mode: int = 0o644) -> None:
        """Add a regular file and its parent directories."""
        self._parent(path)
        self.entries[path] = (stat.S_IFREG | mode, content)

    def link(self, path: str, target: str) -> None:
        """Add a symbolic link and its parent directories."""
        self._parent(path)
        self.entries[path] = (stat.S_IFLNK | 0o777, target.encode())

    def archive(self) -> bytes:
        """Return the uncompressed cpio archive."""
        names = sorted(self.entries)  # a directory precedes its files, as a prefix of their names
        out = [_record(n, i, *self.entries[n]) for i, n in enumerate(names, 1)]
        out.append(_record("TRAILER!!!", 0, 0, b""))
        return b"".join(out)

    def compressed(self) -> bytes:
        """Return the archive compressed with gzip, which every kernel supports."""
        return gzip.compress(self.archive(), compresslevel=9, mtime=0)

    def _parent(self, path: str) -> None:
        parent = str(Path(path).parent)
        if parent != "." and parent not in self.entries:
            self.directory(parent)


def _record(name: str, inode: int, mode: int, content: bytes) -> bytes:
    """Return one newc record: 13 numbers of 8 hexadecimal digits, the name, the content."""
    encoded = name.encode() + b"\0"
    links = 2 if stat.S_ISDIR(mode) else 1
    numbers = (inode, mode, 0, 0, links, 0, len(content), 0, 0, 0, 0, len(encoded), 0)
    header = b"070701" + b"".join(b"%08X" % n for n in numbers) + encoded
    return _pad(header) + _pad(content)


def _pad(data: bytes) -> bytes:
    return data + bytes(-len(data) % 4)


def add_modules(tree: InitramfsTree, kernel: KernelPackage, wanted: Iterable[str]) -> list[str]:
    """Add modules, their dependencies and modprobe's index; return names in load order.

    Omits modules that are built into the kernel. Raises Refused for an unknown module.
    """
    available = _available_modules(kernel)
    listed = (kernel.modules / "modules.builtin").read_bytes()
    builtin = _names(listed)
    order: dict[str, tuple[Path, tuple[str, ...]]] = {}

    def visit(name: str) -> None:
        if name in order or name in builtin:
            return
        if name not in available:
            raise Refused(f"{kernel.package} has no module {name}")
        needs = _needs(_read(available[name]))
        for need in needs:
            visit(need)
        order[name] = (available[name], needs)

    for name in wanted:
        visit(canonical(name))
    base = f"{MODULES}/{kernel.release}"
    needs = {name: direct for name, (_, direct) in order.items()}
    dep = ""
    for name, (path, _) in sorted(order.items()):
        tree.file(f"{base}/{_module_path(kernel, path)}", _read(path))
        files = [_module_path(kernel, order[n][0]) for n in _closure(name, needs)]
        dep += " ".join([f"{_module_path(kernel, path)}:", *files]) + "\n"
    tree.file(f"{base}/modules.dep", dep.encode())
    tree.file(f"{base}/modules.builtin", listed)
    return list(order)


def canonical(name: str) -> str:
    """Return a module's name as in the kernel: dashes become underscores (modprobe(8))."""
    return name.replace("-", "_")


def _module_path(kernel: KernelPackage, path: Path) -> str:
    return str(path.relative_to(kernel.modules)).removesuffix(".xz")


def _closure(name: str, needs: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Return all dependencies of ``name`` in reverse load order, as in modules.dep(5)."""
    found: dict[str, None] = {}

    def visit(module: str) -> None:
        for need in needs.get(module, ()):
            visit(need)
            found[need] = None

    visit(name)
    return [n for n in reversed(found) if n in needs]


def _available_modules(kernel: KernelPackage) -> dict[str, Path]:
    found = (p for p in sorted(kernel.modules.rglob("*.ko*")) if p.name.endswith(_MODULE_SUFFIXES))
    return {canonical(p.name.split(".ko")[0]): p for p in found}


def _names(listed: bytes) -> frozenset[str]:
    lines = listed.decode().split()
    return frozenset(canonical(Path(line).name.split(".ko")[0]) for line in lines)


def _read(path: Path) -> bytes:
    content = path.read_bytes()
    return lzma.decompress(content) if path.suffix == ".xz" else content


def _needs(module: bytes) -> tuple[str, ...]:
    """Return the names in a module's ``depends=`` (.modinfo section, modinfo(8))."""
    found = re.search(rb"\0depends=([A-Za-z0-9_,-]*)\0", module)
    if found is None:
        raise HostFault("a kernel module has no depends= in its .modinfo section")
    return tuple(canonical(n) for n in found[1].decode().split(",") if n)
