"""For tests: manually made tar files, also such as no tar program writes."""

from __future__ import annotations

import io
import tarfile
from typing import Any

KINDS = {
    "f": tarfile.REGTYPE, "l": tarfile.SYMTYPE, "h": tarfile.LNKTYPE, "d": tarfile.DIRTYPE,
    "c": tarfile.CHRTYPE, "b": tarfile.BLKTYPE, "p": tarfile.FIFOTYPE, "?": b"Z",
}  # fmt: skip
Entry = tuple[str, bytes | str, str] | tuple[str, bytes | str, str, dict[str, Any]]


def tar(*entries: Entry, **pax: str) -> io.BytesIO:
    """Return a tar file of (name, content or link target, kind[, fields of TarInfo])."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name, content, kind, *more in entries:
            info = tarfile.TarInfo(name)
            info.type = KINDS[kind]
            info.pax_headers = dict(pax)
            for key, value in (more[0] if more else {}).items():
                setattr(info, key, value)
            if isinstance(content, str):
                info.linkname = content
                archive.addfile(info)
            else:
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    return out
