"""Waiting for descriptors of any number."""

import fcntl
import os
import resource

import pytest

from vtorque_core.api.children import wait_readable


@pytest.fixture
def high():
    """Return both ends of a pipe; the end to read has a number above 1023."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    low, write = os.pipe()
    read = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, 1024)
    yield read, write
    for each in (low, read, write):
        os.close(each)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_descriptor_above_1023_is_awaited(high):
    """select(2) fails for such descriptors, which a process with many open files has."""
    read, write = high
    assert wait_readable([read], 0) == []
    os.write(write, b"x")
    assert wait_readable([read, write]) == [read]
