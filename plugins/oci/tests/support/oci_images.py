"""Manually made containers in the formats of skopeo, podman and Apptainer: for tests."""

from __future__ import annotations

import gzip
import hashlib
import json
import struct
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tar_files import Entry, tar


def layer(*entries: Entry) -> bytes:
    """Return a tar file of (name, content or target, kind[, fields of TarInfo])."""
    fields = [(*entry[:3], {"mode": 0o755, **dict(*entry[3:])}) for entry in entries]
    return tar(*fields).getvalue()


def digest(data: bytes) -> str:
    """Return a digest in the form of descriptors."""
    return "sha256:" + hashlib.sha256(data).hexdigest()


def zstd(data: bytes) -> bytes:
    """Return the data compressed by the tool."""
    return subprocess.run(["zstd", "-q", "-c"], input=data, capture_output=True, check=True).stdout


def config(layers: Sequence[bytes], **inner: Any) -> dict[str, Any]:
    """Return an image configuration."""
    return {
        "architecture": "amd64",
        "os": "linux",
        "config": inner,
        "rootfs": {"type": "layers", "diff_ids": [digest(each) for each in layers]},
    }


def layout_files(
    layers: Sequence[bytes], compress: Any = gzip.compress, **inner: Any
) -> dict[str, bytes]:
    """Return path to content of an OCI image layout."""
    files: dict[str, bytes] = {"oci-layout": b'{"imageLayoutVersion": "1.0.0"}'}

    def blob(data: bytes, kind: str) -> dict[str, Any]:
        files["blobs/sha256/" + digest(data)[7:]] = data
        return {"mediaType": kind, "digest": digest(data), "size": len(data)}

    base = "application/vnd.oci.image"
    packed = [blob(compress(each), f"{base}.layer.v1.tar+gzip") for each in layers]
    described = blob(json.dumps(config(layers, **inner)).encode(), f"{base}.config.v1+json")
    manifest = {"schemaVersion": 2, "config": described, "layers": packed}
    top = blob(json.dumps(manifest).encode(), f"{base}.manifest.v1+json")
    top["annotations"] = {"org.opencontainers.image.ref.name": "latest"}
    files["index.json"] = json.dumps({"schemaVersion": 2, "manifests": [top]}).encode()
    return files


def saved_files(layers: Sequence[bytes], **inner: Any) -> dict[str, bytes]:
    """Return path to content of the output of docker save and podman save."""
    names = [f"{digest(each)[7:]}.tar" for each in layers]
    text = json.dumps(config(layers, **inner)).encode()
    manifest = [{"Config": "c.json", "RepoTags": ["localhost/app:1"], "Layers": names}]
    return {
        **dict(zip(names, layers, strict=True)),
        "c.json": text,
        "manifest.json": json.dumps(manifest).encode(),
    }


def as_directory(files: Mapping[str, bytes], path: Path) -> Path:
    """Write the files below a new directory."""
    for name, data in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)
    return path


def as_tar(files: Mapping[str, bytes], path: Path) -> Path:
    """Write the files into a tar file."""
    path.write_bytes(layer(*((name, data, "f") for name, data in files.items())))
    return path


def as_sif(root: Path, path: Path, **changes: Any) -> Path:
    """Write a SIF of a directory. ``changes``: header fields, to break it."""
    squashfs = path.with_suffix(".squashfs")
    argv = ["mksquashfs", str(root), str(squashfs), "-quiet", "-no-progress", "-all-root"]
    subprocess.run(argv, check=True, capture_output=True)
    data = squashfs.read_bytes()
    at = {
        "magic": b"SIF_MAGIC\0", "arch": b"02\0", "total": 2, "table": 128, "kind": 0x4004,
        "system": 1, "purpose": 2, "offset": 4096, "size": len(data), **changes,
    }  # fmt: skip
    head = struct.pack(
        "<32s10s3s3s16s8q", b"#!/usr/bin/env run-singularity\n", at["magic"], b"01\0", at["arch"],
        bytes(16), 0, 0, 46, at["total"], at["table"], 48 * 585, 4096, len(data),
    )  # fmt: skip
    form = "<i?III7q128s384s"
    deffile = struct.pack(form, 0x4001, True, 1, 1, 0, 4096, 1, 1, 0, 0, 0, 0, b"def", b"")
    extra = struct.pack("<ii3s", at["system"], at["purpose"], b"02\0")
    where = (at["offset"], at["size"], at["size"])
    part = struct.pack(form, at["kind"], True, 2, 1, 0, *where, 0, 0, 0, 0, b"squash", extra)
    path.write_bytes((head + deffile + part).ljust(4096, b"\0") + data)
    return path
