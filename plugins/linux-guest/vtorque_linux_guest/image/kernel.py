"""Fetch Debian packages, and find the kernel and modules in them, for all image builders.

All functions run as root in ``vmgr images build``, in a scratch directory. Packages come from the
machine's apt sources, so the site's mirror, keys and proxy apply.
"""

from __future__ import annotations

import lzma
import re
import shutil
import struct
import subprocess
import tempfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vtorque_core.api import (
    HostFault,
    Refused,
    guard_command,
    isolate_command,
    name_errors,
    run_tool,
)

DOWNLOAD_TIMEOUT = 600.0  # seconds; a kernel package is 27 MB
UNPACK_TIMEOUT = 120.0  # seconds
MAX_KERNEL = 512 << 20  # bytes, unpacked; Debian's has 50 MiB
_MEMORY = 1 << 30  # bytes of memory for unpacking it

# The tools that builders run, and the Debian packages that contain them.
TOOL_PACKAGES = {
    "apt-cache": "apt",
    "apt-get": "apt",
    "dnf": "dnf",
    "dpkg": "dpkg",
    "dpkg-deb": "dpkg",
    "e2fsck": "e2fsprogs",
    "lz4": "lz4",
    "mmdebstrap": "mmdebstrap",
    "musl-gcc": "musl-tools",
    "qemu-img": "qemu-utils",
    "setpriv": "util-linux",
    "tar": "tar",
    "zstd": "zstd",
}

# Names of the tested architectures: Debian's, then those of the kernel and QEMU.
ARCHITECTURES = {"amd64": "x86_64"}

# Offsets in the setup header of a bzImage: Documentation/arch/x86/boot.rst of the kernel.
_SETUP_SECTORS = 0x1F1
_HEADER_MAGIC = 0x202
_PAYLOAD = 0x248  # payload_offset, payload_length: two 32-bit numbers, protocol 2.08
_ELF = b"\x7fELF"
_LZ4_LEGACY = b"\x02\x21\x4c\x18"
_ZSTD = b"\x28\xb5\x2f\xfd"


@dataclass(frozen=True)
class KernelPackage:
    """A kernel package unpacked below ``root``; ``release`` is the output of ``uname -r``."""

    root: Path
    release: str
    package: str
    version: str

    @property
    def modules(self) -> Path:
        """The directory of the kernel's modules."""
        for base in ("lib/modules", "usr/lib/modules"):
            if (self.root / base / self.release).is_dir():
                return self.root / base / self.release
        raise HostFault(f"{self.package} has no modules for kernel {self.release}")


def need_tools(*tools: str) -> None:
    """Raise HostFault if a tool is not installed. The message names the Debian packages."""
    path = "/usr/sbin:/usr/bin:/sbin:/bin"
    missing = [tool for tool in tools if shutil.which(tool, path=path) is None]
    if missing:
        packages = sorted({TOOL_PACKAGES.get(tool, tool) for tool in missing})
        raise HostFault(
            f"{', '.join(missing)}: not installed; run: apt-get install {' '.join(packages)}"
        )


def architecture() -> tuple[str, str]:
    """Return this machine's architecture as named by Debian and by QEMU.

    Raises Refused if the architecture is not in :data:`ARCHITECTURES`.
    """
    machine = run_tool("dpkg", "--print-architecture").strip()
    if machine not in ARCHITECTURES:
        raise Refused(f"images can only be built on {', '.join(ARCHITECTURES)}, not on {machine}")
    return machine, ARCHITECTURES[machine]


def fetch(names: Sequence[str], into: Path, debs: Path | None = None) -> list[Path]:
    """Download a .deb of each package into ``into``; return the paths in the order of names.

    If ``debs`` is given, use the packages in that directory instead. ``apt-get download`` verifies
    each package against the signed index of its source (apt-secure(8)). Raises HostFault if a
    download fails, Refused for a package that is not in ``debs``.
    """
    if debs is not None:
        return [_only_deb(name, debs) for name in names]
    need_tools("apt-get")
    try:
        # -C: apt-get download has no option for where it writes. APT::Sandbox::User: its own user
        # cannot write to root's scratch directory, so apt would print a warning.
        run_tool(
            *("env", "-C", str(into), "apt-get", "download", "--quiet"),
            *("-o", "APT::Sandbox::User=root", *names),
            timeout=DOWNLOAD_TIMEOUT,
        )
    except HostFault as error:
        raise HostFault(f"{error}; try apt-get update", stage="download") from None
    return [_only_deb(name, into) for name in names]


def _only_deb(name: str, directory: Path) -> Path:
    found = sorted(directory.glob(f"{name}_*.deb"))
    if len(found) != 1:
        raise Refused(f"{directory} has {len(found)} files {name}_*.deb; exactly one is needed")
    return found[0]


def kernel_package(debian_arch: str, debs: Path | None = None, flavour: str = "cloud") -> str:
    """Return the package name of the newest kernel, e.g. linux-image-6.1.0-1-cloud-amd64.

    The ``cloud`` kernel has virtio and few other drivers, the ``generic`` kernel has all drivers of
    Debian. Raises HostFault and Refused.
    """
    suffix = f"cloud-{debian_arch}" if flavour == "cloud" else debian_arch
    number = "[0-9][A-Za-z0-9.+~-]*" if flavour == "cloud" else "[0-9][0-9.+~-]*"
    pattern = rf"linux-image-{number}-{suffix}"
    if debs is not None:
        names = {p.name.split("_")[0] for p in debs.glob("linux-image-*.deb")}
        found = sorted(n for n in names if re.fullmatch(pattern, n))
        if len(found) != 1:
            raise Refused(f"{debs} has {len(found)} packages {pattern}; exactly one is needed")
        return found[0]
    need_tools("apt-cache")
    meta = f"linux-image-{suffix}"
    try:
        shown = run_tool("apt-cache", "--no-all-versions", "show", meta)
    except HostFault as error:
        raise HostFault(f"{error}; run: apt-get update", stage="download") from None
    depends = re.search(rf"^Depends:.*?({pattern})", shown, re.MULTILINE)
    if depends is None:
        raise HostFault(
            f"the package {meta} of this machine's apt sources depends on no kernel package"
        )
    return depends[1]


def unpack(deb: Path, into: Path) -> None:
    """Unpack a package's files without running its scripts (dpkg-deb(1), -x)."""
    need_tools("dpkg-deb")
    run_tool("dpkg-deb", "-x", str(deb), str(into), timeout=UNPACK_TIMEOUT)


def program(unpacked: Path, name: str) -> Path:
    """Return the path of a program in unpacked packages: ``/bin/NAME`` or ``/usr/bin/NAME``.

    Raises HostFault if the packages do not contain the program.
    """
    for base in ("bin", "usr/bin"):
        if (unpacked / base / name).is_file():
            return unpacked / base / name
    raise HostFault(f"the packages do not contain the program {name}")


def fetch_kernel(
    scratch: Path, progress: Callable[[str], None], debs: Path | None, flavour: str = "cloud"
) -> KernelPackage:
    """Fetch and unpack the kernel below ``scratch``. Raises HostFault and Refused."""
    debian_arch, _ = architecture()
    package = kernel_package(debian_arch, debs, flavour)
    progress(f"kernel package {package}")
    deb = fetch([package], scratch, debs)[0]
    root = scratch / "kernel"
    root.mkdir()
    unpack(deb, root)
    version = run_tool("dpkg-deb", "-f", str(deb), "Version").strip()
    return KernelPackage(root, package.removeprefix("linux-image-"), package, version)


def vmlinux(kernel: KernelPackage) -> bytes:
    """Return the uncompressed kernel (ELF). QEMU boots it fastest, through its PVH entry point."""
    image = kernel.root / "boot" / f"vmlinuz-{kernel.release}"
    if not image.is_file():
        raise HostFault(f"{kernel.package} has no boot/{image.name}")
    return extract_vmlinux(image.read_bytes())


def extract_vmlinux(image: bytes) -> bytes:
    """Return the ELF file inside a bzImage. Raises HostFault if there is none.

    The setup header contains the payload's offset (Documentation/arch/x86/boot.rst of the kernel,
    payload_offset). To lz4 and zstd data the kernel build appends the uncompressed size
    (scripts/Makefile.lib, size_append). This size is cut off: lz4(1) and zstd(1) reject it.
    """
    if len(image) < _PAYLOAD + 8 or image[_HEADER_MAGIC : _HEADER_MAGIC + 4] != b"HdrS":
        raise HostFault("the kernel is not a bzImage: no HdrS magic")
    start = (image[_SETUP_SECTORS] or 4) * 512 + 512
    offset, length = struct.unpack_from("<II", image, _PAYLOAD)
    payload = image[start + offset : start + offset + length]
    elf = _decompress(payload)
    if not elf.startswith(_ELF):
        raise HostFault("the kernel's payload is not an ELF file")
    return elf


def _decompress(payload: bytes) -> bytes:
    """Return the decompressed payload of a bzImage. Raises HostFault.

    A recipe's packages are untrusted, so the size is limited to :data:`MAX_KERNEL` and no external
    tool parses the payload as root.
    """
    with name_errors("the kernel's compressed payload is damaged", zlib.error, lzma.LZMAError):
        # Decompressor objects, unlike the functions, stop where the compressed data ends.
        if payload.startswith(b"\x1f\x8b"):
            return _check_size(zlib.decompressobj(wbits=31).decompress(payload, MAX_KERNEL + 1))
        if payload.startswith(b"\xfd7zXZ\x00"):
            unpack = lzma.LZMADecompressor(memlimit=_MEMORY)
            return _check_size(unpack.decompress(payload, MAX_KERNEL + 1))
    if payload.startswith(_LZ4_LEGACY):
        return _decompress_with("lz4", payload[:-4])
    if payload.startswith(_ZSTD):
        return _decompress_with("zstd", payload[:-4])
    raise HostFault(f"the kernel's compression is unknown: {payload[:6].hex()}")


def _decompress_with(tool: str, data: bytes) -> bytes:
    need_tools(tool)
    limits = (f"--as={_MEMORY}", f"--fsize={MAX_KERNEL + 1}", "--core=0")
    with tempfile.TemporaryFile() as packed, tempfile.TemporaryFile() as plain:
        packed.write(data)
        packed.seek(0)
        try:
            done = subprocess.run(
                guard_command(*isolate_command(), "prlimit", *limits, "--", tool, "-d", "-q", "-c"),
                stdin=packed,
                stdout=plain,
                stderr=subprocess.PIPE,
                env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"},
                cwd="/",
                timeout=UNPACK_TIMEOUT,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise HostFault(f"{tool}: timed out after {UNPACK_TIMEOUT:g} s") from None
        _check_size(b"", plain.seek(0, 2))
        if done.returncode != 0:
            output = done.stderr.decode("utf-8", "replace").strip()[-500:]
            raise HostFault(f"{tool}: exit code {done.returncode}: {output}")
        plain.seek(0)
        return plain.read()


def _check_size(data: bytes, size: int = 0) -> bytes:
    if max(len(data), size) > MAX_KERNEL:
        raise HostFault(f"the kernel unpacks to more than {MAX_KERNEL >> 20} MiB")
    return data


def debs_directory(arguments: Mapping[str, str]) -> Path | None:
    """Return the directory of the builder's option ``debs``, if given. Raises Refused."""
    if "debs" not in arguments:
        return None
    debs = Path(arguments["debs"])
    if not debs.is_absolute() or not debs.is_dir():
        raise Refused(f"debs={debs}: must be the absolute path of a directory of .deb files")
    return debs
