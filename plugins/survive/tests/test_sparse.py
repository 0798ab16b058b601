"""Files with holes."""

import errno
import os

import pytest

from vtorque_survive import sparse


def test_unreadable_file_raises_instead_of_an_empty_copy(tmp_path, monkeypatch):
    def fails(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    (tmp_path / "disk").write_bytes(b"data")
    monkeypatch.setattr(os, "lseek", fails)
    with (
        (tmp_path / "disk").open() as disk,
        (tmp_path / "copy").open("w") as copy,
        pytest.raises(OSError, match="Input/output error"),
    ):
        sparse.copy_data(disk.fileno(), copy.fileno())
