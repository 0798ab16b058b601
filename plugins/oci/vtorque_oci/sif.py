"""Read image files of Apptainer and Singularity (SIF): header and squashfs partition.

Source: github.com/apptainer/sif v2, pkg/sif/{sif,descriptor}.go: a global header of 128 bytes, then
descriptors of 585 bytes, with little-endian numbers.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from pathlib import Path

from vtorque_core.api import Refused
from vtorque_linux_guest.image.filetree import FileTree
from vtorque_oci.blobs import copy, numbers, run_as_nobody, run_parser
from vtorque_oci.container import Container

# hdrLaunch 32s, hdrMagic 10s, hdrVersion 3s, hdrArch 3s, UUID 16s, then eight int64
_HEADER = struct.Struct("<32s10s3s3s16s8q")
# DataType int32, Used bool, ID, GroupID, LinkedID uint32, Offset, Size, SizeWithPadding,
# CreatedAt, ModifiedAt, UID, GID int64, Name 128s, Extra 384s; Go's encoding/binary has no padding
_DESCRIPTOR = struct.Struct("<i?III7q128s384s")
_MAGIC = b"SIF_MAGIC\0"
_PARTITION = 0x4004
_SQUASHFS, _PRIMARY = 1, 2
_ARCHITECTURES = {"x86_64": b"02\0", "aarch64": b"04\0", "ppc64le": b"06\0", "s390x": b"11\0"}
_MAX_DESCRIPTORS = 4096

ENVIRONMENT = "usr/lib/vtorque/sif-environment"
# As Singularity does it: source the image's shell files, then run the program.
_ENVIRONMENT_SCRIPT = """#!/bin/sh
for file in /.singularity.d/env/*.sh; do
    [ ! -r "$file" ] || . "$file"
done
unset file
exec "$@"
"""


def is_sif(head: bytes) -> bool:
    """Return whether a file that begins with these bytes is a SIF."""
    return head[32:42] == _MAGIC


def partition(arch: str, descriptor: int) -> Iterator[bytes]:
    """Yield offset and size of the root file system. Raises Refused. Runs without privileges."""
    size = os.fstat(descriptor).st_size
    head = os.pread(descriptor, _HEADER.size, 0)
    if len(head) < _HEADER.size or not is_sif(head):
        raise Refused("is not a SIF file")
    _, _, _, made_for, _, _, _, _, total, table, *_ = _HEADER.unpack(head)
    if made_for not in (_ARCHITECTURES.get(arch), b"00\0"):
        raise Refused(
            f"the SIF's header has the architecture {made_for[:2]!r}, but guests have {arch}"
        )
    if not 0 < total <= _MAX_DESCRIPTORS or table < 0 or table + total * _DESCRIPTOR.size > size:
        raise Refused("the SIF is truncated, or its header is invalid")
    data = os.pread(descriptor, total * _DESCRIPTOR.size, table)
    if len(data) != total * _DESCRIPTOR.size:
        raise Refused("the SIF is truncated")
    for fields in _DESCRIPTOR.iter_unpack(data):
        kind, used, offset, count, extra = fields[0], fields[1], fields[5], fields[6], fields[13]
        if not used or kind != _PARTITION:
            continue
        system, purpose = struct.unpack_from("<ii", extra)
        if purpose != _PRIMARY:
            continue
        if system != _SQUASHFS:
            raise Refused(
                f"the SIF's root file system has type {system}, but only squashfs is supported"
            )
        if offset < 0 or count <= 0 or offset + count > size:
            raise Refused("the SIF is truncated: its root file system is not complete")
        yield from (b"%d" % offset, b"%d" % count)
        return
    raise Refused("the SIF has no readable root file system; it may be encrypted")


def read_sif(descriptor: int, work: Path, most: int, arch: str, title: str) -> Container:
    """Return the container in a SIF, with its root file system as one tar file in ``work``.

    Raises Refused; HostFault if sqfs2tar is missing.
    """
    offset, size = numbers(run_parser(partition, arch, files=[descriptor]), descriptor)
    if size > most:
        raise Refused(f"the SIF has {size >> 20} MiB, more than the root disk (-o size=)")
    packed, layer = work / "squashfs", work / "layer0.tar"
    copy(descriptor, offset, size, packed, None)
    packed.chmod(0o644)  # the tool, which runs as nobody, reopens it
    with packed.open("rb") as file:
        argv = ("sqfs2tar", "--no-skip", "/proc/self/fd/0")
        run_as_nobody(argv, file, layer, most, "squashfs-tools-ng")
    packed.unlink()
    return Container(((layer, None),), {}, ("/.singularity.d/runscript",), (), title)


def add_environment(tree: FileTree) -> tuple[str, ...]:
    """Add the script that sets a SIF's environment; return the command prefix that runs it."""
    tree.file(ENVIRONMENT, _ENVIRONMENT_SCRIPT.encode(), 0o755)
    return (f"/{ENVIRONMENT}",)
