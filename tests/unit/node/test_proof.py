import json
import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vtorque_core.api.guest_driver import ReadyGuest
from vtorque_core.base.errors import HostFault
from vtorque_core.base.names import JobAttempt, Paths
from vtorque_core.node.shell import proof as proofs
from vtorque_core.node.shell.proof import Proof

ME = os.getuid()
JOB = "42.srv"
READY = Proof(  # noqa: S604
    JobAttempt(JOB, 0, "ada", ME, "n1"),
    "ready",
    deadline=1.5,
    guest_type="linux",
    plugin="linux-guest",
    shell="/bin/bash",
    files={"vm_prologue": proofs.digest(b"\x00\xffbytes")},
    environ={"A": "b\nc"},
    unless={"A": ("A", "B")},
    guests=(ReadyGuest("vt-1", "vnode", 0, Path("/run/x")),),
)


@pytest.fixture
def paths(tmp_path):
    tmp_path.chmod(0o755)
    return Paths(state=tmp_path, run=tmp_path)


def test_written_proof_is_read_back(paths):
    proofs.write(paths, READY)
    assert proofs.read(paths, JOB, ME, owner_uid=ME) == READY
    file = paths.proof(JOB)
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o711, "users can list job ids"
    assert json.loads(file.read_bytes())["schema"] == 4
    proofs.write(paths, replace(READY, state="refused", reason="no"), gid=os.getgid())
    found = proofs.read(paths, JOB, ME, owner_uid=ME)
    assert found is not None and (found.state, found.reason) == ("refused", "no")
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert [p.name for p in file.parent.iterdir()] == [file.name], "a temporary file is left"
    proofs.remove(paths, JOB)
    proofs.remove(paths, JOB)
    assert proofs.read(paths, JOB, ME, owner_uid=ME) is None


def test_missing_directory_means_no_proof(paths):
    assert proofs.read(paths, JOB, ME, owner_uid=ME) is None


def test_proof_that_others_can_write_is_rejected(paths):
    proofs.write(paths, READY)
    file = paths.proof(JOB)
    for path, mode in ((file, 0o666), (file, 0o664), (file.parent, 0o777), (paths.run, 0o775)):
        good = stat.S_IMODE(path.stat().st_mode)
        path.chmod(mode)
        with pytest.raises(HostFault, match="can be written by others"):
            proofs.read(paths, JOB, ME, owner_uid=ME)
        path.chmod(good)


def test_proof_of_another_owner_is_rejected(paths):
    proofs.write(paths, READY)
    with pytest.raises(HostFault, match=f"belongs to uid {ME}, not {ME + 1}"):
        proofs.read(paths, JOB, ME, owner_uid=ME + 1)


def test_links_and_fifos_are_rejected(paths):
    proofs.write(paths, READY)
    file = paths.proof(JOB)
    moved = file.rename(paths.run / "moved")
    file.symlink_to(moved)
    with pytest.raises(HostFault, match="proof"):
        proofs.read(paths, JOB, ME, owner_uid=ME)
    file.unlink()
    os.mkfifo(file, 0o644)
    with pytest.raises(HostFault, match="has the wrong type"):
        proofs.read(paths, JOB, ME, owner_uid=ME)
    file.unlink()
    file.parent.rename(paths.run / "elsewhere")
    file.parent.symlink_to(paths.run / "elsewhere")
    with pytest.raises(HostFault, match="has the wrong type"):
        proofs.read(paths, JOB, ME, owner_uid=ME)


def test_proof_of_another_job_or_user_is_rejected(paths):
    proofs.write(paths, READY)
    paths.proof(JOB).rename(paths.proof("43.srv"))
    with pytest.raises(HostFault, match=r"belongs to job '42\.srv'"):
        proofs.read(paths, "43.srv", ME, owner_uid=ME)
    proofs.write(paths, replace(READY, job=replace(READY.job, uid=ME + 7)))
    with pytest.raises(HostFault, match=f"of uid {ME + 7}"):
        proofs.read(paths, JOB, ME, owner_uid=ME)


GOOD = json.loads(READY.encode())


@pytest.mark.parametrize(
    "change",
    [
        {"schema": 2},
        {"state": "go"},
        {"state": ["ready"]},
        {"job": GOOD["job"] | {"uid": "0"}},
        {"job": GOOD["job"] | {"uid": True}},
        {"job": GOOD["job"] | {"uid": -1}},
        {"job": GOOD["job"] | {"attempt": 0.5}},
        {"grace": -1},
        {"grace": 10**400},
        {"environ": {"A\0B": "1"}},
        {"job": {"id": JOB}},
        {"job": None},
        {"deadline": "soon"},
        {"grace": float("nan")},
        {"grace": float("inf")},
        {"shell": 3},
        {"shell": "a\0b"},
        {"files": {"vm_prologue": 1}},
        {"files": {"../x": "0"}},
        {"files": ["vm_prologue"]},
        {"environ": []},
        {"environ": {"A": 1}},
        {"guests": {}},
        {"guests": ["x"]},
        {"guests": [{"name": "x"}]},
    ],
)
def test_damaged_proof_is_rejected(change):
    with pytest.raises(ValueError):
        Proof.decode(json.dumps(GOOD | change).encode())


@pytest.mark.parametrize("key", sorted(GOOD))
def test_proof_without_a_field_is_rejected(key):
    with pytest.raises(ValueError, match="not a proof"):
        Proof.decode(json.dumps({k: v for k, v in GOOD.items() if k != key}).encode())


@given(st.binary(max_size=80) | st.just(b"[" * 100_000))
def test_hostile_bytes_raise_value_error_only(data):
    with pytest.raises(ValueError):
        Proof.decode(data)


def test_oversized_proof_is_rejected(paths):
    proofs.write(paths, replace(READY, reason="x" * proofs.MAX_BYTES))
    with pytest.raises(HostFault, match="more than"):
        proofs.read(paths, JOB, ME, owner_uid=ME)


def test_user_file_is_read_if_its_hash_matches(paths):
    path = proofs.user_file_path(paths, READY.job, "vm_prologue")
    path.parent.mkdir(parents=True)
    path.write_bytes(b"\x00\xffbytes")
    assert proofs.user_file(paths, READY, "vm_prologue") == b"\x00\xffbytes"
    assert proofs.user_file(paths, READY, "vm_epilogue") is None
    path.write_bytes(b"\x00\xffbytez")
    with pytest.raises(HostFault, match="vm_prologue was changed"):
        proofs.user_file(paths, READY, "vm_prologue")
    moved = path.rename(path.with_name("moved"))
    moved.write_bytes(b"\x00\xffbytes")
    path.symlink_to(moved)
    with pytest.raises(HostFault, match="vm_prologue: Too many levels of symbolic links"):
        proofs.user_file(paths, READY, "vm_prologue")
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(HostFault, match="is not a regular file"):
        proofs.user_file(paths, READY, "vm_prologue")
    path.unlink()
    with pytest.raises(HostFault, match="No such file"):
        proofs.user_file(paths, READY, "vm_prologue")


def test_proof_contains_no_text_of_the_user(paths):
    assert b"bytes" not in READY.encode()
