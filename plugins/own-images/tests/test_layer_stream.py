"""A layer that is read forward while it is decompressed."""

from __future__ import annotations

import gzip
import hashlib
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from oci_images import zstd
from vtorque_core.api import Refused
from vtorque_own_images.layer_stream import LayerStream

DATA = bytes(range(256)) * 20000
DIGEST = hashlib.sha256(DATA).hexdigest()


def a_layer(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "layer"
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("pack", [gzip.compress, zstd, bytes])
def test_stream_reads_forward_and_again_after_restart(
    tmp_path: Path, pack: Callable[[bytes], bytes]
) -> None:
    stream = LayerStream(a_layer(tmp_path, pack(DATA)), len(DATA))
    for checked in (True, False):
        assert stream.read(3) == DATA[:3]
        assert stream.seek(1_000_000) == 1_000_000
        assert stream.read(2_000_000) == DATA[1_000_000:3_000_000]
        with pytest.raises(ValueError, match="cannot seek from"):
            stream.seek(5)
        stream.check(DIGEST if checked else None)
        assert stream.read(1) == b""
        stream.restart()
    stream.close()


@pytest.mark.parametrize("pack", [gzip.compress, zstd, bytes])
def test_stream_sends_parts_to_a_pipe(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    stream = LayerStream(a_layer(tmp_path, pack(DATA)), len(DATA))
    stream.check(DIGEST)
    stream.restart()
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as reader:
        assert reader.stdin is not None and reader.stdout is not None
        with ThreadPoolExecutor(1) as thread:
            received = thread.submit(reader.stdout.read)
            stream.seek(1000)
            assert stream.send(2_000_000, reader.stdin.fileno()) == 2_000_000
            stream.seek(len(DATA) - 10)
            assert stream.send(20, reader.stdin.fileno()) == 10
            reader.stdin.close()
        assert received.result() == DATA[1000:2_001_000] + DATA[-10:]
    stream.close()


def test_gzip_members_are_one_layer(tmp_path: Path) -> None:
    """Tools that permit random access compress each file of a layer separately."""
    parts = b"".join(
        gzip.compress(DATA[at : at + 1_000_000]) for at in range(0, len(DATA), 1_000_000)
    )
    stream = LayerStream(a_layer(tmp_path, parts), len(DATA))
    assert stream.check(DIGEST) == len(DATA)
    stream.close()


def test_zstd_frame_that_needs_much_memory_is_refused(tmp_path: Path) -> None:
    argv = ["zstd", "-q", "-c", "-1", "--long=28", "--no-check"]
    data = subprocess.run(argv, input=DATA, capture_output=True, check=True).stdout
    stream = LayerStream(a_layer(tmp_path, data), len(DATA))
    with pytest.raises(Refused, match="too much memory"):
        stream.check(DIGEST)
    stream.close()


@pytest.mark.parametrize("pack", [gzip.compress, zstd])
def test_truncated_layer_is_refused(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    stream = LayerStream(a_layer(tmp_path, pack(DATA)[:-9]), len(DATA))
    with pytest.raises(Refused, match="damaged"):
        stream.check(DIGEST)
    stream.close()


def test_layer_with_other_hash_is_refused(tmp_path: Path) -> None:
    stream = LayerStream(a_layer(tmp_path, DATA), len(DATA))
    with pytest.raises(Refused, match="but the configuration requires 0000"):
        stream.check("0" * 64)
    stream.close()


def test_layer_that_unpacks_to_too_much_is_refused(tmp_path: Path) -> None:
    stream = LayerStream(a_layer(tmp_path, gzip.compress(bytes(10 << 20))), 1 << 20)
    with pytest.raises(Refused, match="more than 1 MiB"):
        stream.check(None)
    stream.close()


def test_layer_of_other_compression_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="gzip or zstd"):
        LayerStream(a_layer(tmp_path, b"BZh91AY"), 1)
