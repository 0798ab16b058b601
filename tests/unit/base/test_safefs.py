"""Descriptors are closed and errors name their file, also if the work fails."""

import os
import stat
from pathlib import Path

import pytest

from vtorque_core.base import safefs
from vtorque_core.base.errors import HostFault


def test_closing_closes_the_descriptor_when_the_work_raises(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match="work"),
        safefs.closing(os.open(tmp_path, os.O_RDONLY)) as descriptor,
    ):
        raise ValueError("work")
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_naming_turns_oserror_into_hostfault_with_path_reason_and_stage() -> None:
    with pytest.raises(HostFault) as caught, safefs.name_errors("/no/such", stage="proof"):
        Path("/no/such").stat()
    assert str(caught.value) == "proof: /no/such: No such file or directory"
    assert caught.value.stage == "proof"


def test_naming_does_not_change_other_errors() -> None:
    with pytest.raises(HostFault, match=r"^it is gone$"), safefs.name_errors("/a/path"):
        raise HostFault("it is gone")


@pytest.mark.parametrize(
    ("uid", "own_gid", "mode", "can"),
    [
        (1234, 1234, 0o775, False),
        (1234, 1234, 0o777, True),
        (1234, 100, 0o775, True),
        (0, 0, 0o775, True),
    ],
)
def test_private_group_of_a_user_is_not_counted_as_others(
    monkeypatch, tmp_path, uid, own_gid, mode, can
):
    """With umask 002, Debian's users have directories that their group can write."""
    status = os.stat_result((stat.S_IFDIR | mode, 0, 0, 2, uid, uid, 0, 0, 0, 0))
    monkeypatch.setattr(os, "getegid", lambda: own_gid)
    assert safefs.others_can_write(status, uid, tmp_path) is can
