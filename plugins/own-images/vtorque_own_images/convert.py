"""Convert a container image to a squashfs, as the user.

The layers are merged in memory (:mod:`vtorque_oci.layers`), so names in them are never used as
paths on this machine. sqfstar(1) reads the result as a tar stream. Each layer is decompressed
twice, first for the names and then for the contents, instead of being unpacked to the disk.
"""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tarfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import IO, cast

from vtorque_core.api import HostFault, Refused
from vtorque_linux_guest.image.filetree import FileTree, Slice, TreeNode
from vtorque_linux_guest.image.kernel import architecture
from vtorque_linux_guest.image.tar_reader import Budget
from vtorque_oci import build, layers, sif
from vtorque_oci.sandbox import ENV, sandbox_command
from vtorque_own_images.layer_stream import LayerStream, enlarge_pipe
from vtorque_own_images.skopeo import FULL, full_disk_error

# sqfstar 4.5.1 of Debian 12 accepts no level of zstd. By default, it uses a quarter of the memory.
_OPTIONS = ("-comp", "lz4", "-mem", "128M", "-quiet", "-no-progress", "-force")
# Virtual memory in bytes, and CPU time in seconds: that of sqfstar grows with the square of the
# number of files in a directory. An image of 64 GiB needs a fifth.
_LIMITS = ("--as=2147483648", "--cpu=7200")
Told = Callable[[int, int], None]
"""A function that gets the progress of a conversion: bytes of files written, and all bytes."""

_PATHS = 512 << 20  # bytes of all paths in memory
_KINDS = {stat.S_IFDIR: tarfile.DIRTYPE, stat.S_IFLNK: tarfile.SYMTYPE}
_KINDS |= {stat.S_IFREG: tarfile.REGTYPE, stat.S_IFIFO: tarfile.FIFOTYPE}


def convert(source: Path, work: Path, made: Path, most: int, told: Told) -> None:
    """Convert an OCI layout or SIF file to the squashfs ``made``.

    ``most`` limits the size of all files in MiB. ``work`` is an existing directory for temporary
    files. ``told`` gets the progress. Raises Refused, HostFault.
    """
    unpacked = work / "unpacked"
    shutil.rmtree(unpacked, ignore_errors=True)  # left by an interrupted conversion
    made.unlink(missing_ok=True)
    unpacked.mkdir()
    options = build.BuildOptions(source=str(source), size=most)
    _, arch = architecture()
    private = source.parent == work  # skopeo has copied and verified it
    container, from_sif = build.read_container(options, unpacked, arch, private=private)
    with ExitStack() as stack:
        tree, budget = FileTree(), Budget()
        room = most << 21  # bytes of all layers: headers, padding, and files that other layers hide
        for path, digest in container.layers:
            stream = LayerStream(path, room)
            stack.callback(stream.close)
            layers.apply(tree, cast(IO[bytes], stream), most << 20, _is_kept, budget)
            room -= stream.check(digest)
            stream.restart()
        _require_size(tree, most)
        tree.remove(build.HOME)
        prefix = sif.add_environment(tree) if from_sif else ()
        build.prepare(tree, container, options, prefix)
        write(tree, made, told)


def _require_size(tree: FileTree, most: int) -> None:
    sizes = {id(node): node.size for _, node in tree.walk() if node.is_file}
    if sum(sizes.values()) > most << 20:
        raise Refused(f"has more than {most} MiB of files (the limit is -o size=)")


def _is_kept(attribute: str) -> bool:
    return attribute == "security.capability" or (
        attribute.startswith("user.") and attribute.isprintable()  # also: it is valid UTF-8
    )


def write(tree: FileTree, made: Path, told: Told) -> None:
    """Write the tree as a squashfs. Raises Refused for a full disk, HostFault for other errors."""
    with made.open("xb") as file:
        os.fchmod(file.fileno(), 0o666)  # sqfstar opens it again: if we are root, it is nobody
        name = f"/proc/self/fd/{file.fileno()}"
        command = sandbox_command(
            "sqfstar", *_OPTIONS, name, limits=_LIMITS, package="squashfs-tools"
        )
        tool = subprocess.Popen(
            command, env=ENV, cwd="/", pass_fds=(file.fileno(),),
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )  # fmt: skip
    with tool:
        assert tool.stdin is not None and tool.stderr is not None  # noqa: S101 - pipes
        enlarge_pipe(tool.stdin)
        try:
            _stream(tree, tool.stdin, told)
            tool.stdin.close()
        except BrokenPipeError:
            pass  # sqfstar's error output, read below, has the reason
        output = tool.stderr.read(65536).decode("utf-8", "replace").strip()
    made.chmod(0o600)
    if tool.returncode:
        made.unlink(missing_ok=True)
        if any(word in output.lower() for word in FULL):
            raise full_disk_error(made.parent)
        raise HostFault(f"sqfstar: exit code {tool.returncode}: {output[-300:]}")


def _stream(tree: FileTree, out: IO[bytes], told: Told) -> None:
    """Write the tree as a tar file. A file with several names becomes one file with hard links.

    This function copies the content itself, because :mod:`tarfile` copies each byte several times
    in memory. These copies would take as long as the decompression of the layers.
    """
    first: dict[int, str] = {}
    later, most = [], _PATHS
    for path, node in tree.walk():
        most -= sys.getsizeof(path)
        if most < 0:
            raise Refused("the image's paths need more than 512 MiB of memory")
        if not node.is_file:
            out.write(_header(_info(path, node)))
        elif first.setdefault(id(node), path) == path:
            later.append((path, node))
    layer: LayerStream | None = None
    total, done, shown = sum(node.size for _, node in later), 0, 0
    for path, node in sorted(later, key=_place):
        out.write(_header(_info(path, node)))
        if isinstance(node.content, bytes):
            out.write(node.content)
        else:
            layer = _send_content(node.content, layer, out)
        out.write(bytes(-node.size % tarfile.BLOCKSIZE))
        done += node.size
        if done - shown >= total // 100:
            told(done, total)
            shown = done
    for path, node in tree.walk():
        if node.is_file and first[id(node)] != path:
            info = _info(path, node)
            info.type, info.linkname, info.size = tarfile.LNKTYPE, first[id(node)], 0
            out.write(_header(info))
    out.write(bytes(2 * tarfile.BLOCKSIZE))


def _header(info: tarfile.TarInfo) -> bytes:
    return info.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def _place(found: tuple[str, TreeNode]) -> tuple[int, int]:
    """Return a key that sorts files by layer, then by their position in the layer."""
    content = found[1].content
    return (id(content.file), content.offset) if isinstance(content, Slice) else (0, 0)


def _info(path: str, node: TreeNode) -> tarfile.TarInfo:
    info = tarfile.TarInfo(path or ".")
    info.type = _KINDS.get(stat.S_IFMT(node.mode), tarfile.REGTYPE)
    info.mode, info.uid, info.gid = stat.S_IMODE(node.mode), node.uid, node.gid
    info.mtime, info.size = node.mtime, node.size if node.is_file else 0
    if node.is_link:
        info.linkname = node.read(4096).decode("utf-8", "surrogateescape")
    info.pax_headers = {
        f"SCHILY.xattr.{name}": value.decode("utf-8", "surrogateescape")
        for name, value in node.xattrs.items()
    }
    return info


def _send_content(part: Slice, last: LayerStream | None, out: IO[bytes]) -> LayerStream:
    """Write a part of a layer to ``out``; return this layer, which stays open.

    ``last`` is the result of the previous call. It is closed if ``part`` is in another layer.
    """
    layer = cast(LayerStream, part.file)
    if last is not None and layer is not last:
        last.close()
    layer.seek(part.offset)
    out.flush()
    if layer.send(part.size, out.fileno()) < part.size:
        raise Refused("a layer is truncated")
    return layer
