"""Shares: tests without root. The daemon itself is tested in tests/e2e/test_virtiofs.py."""

import json
import os
import subprocess
import sys
import textwrap
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vtorque_core.base.errors import HostFault
from vtorque_core.resources import _user_daemon_exec, user_daemon, virtiofs_daemon

HOLDER = """
import fcntl, json, os, sys, time
lock, socket, posix = sys.argv[1:]
fd = os.open(lock, os.O_RDWR | os.O_CREAT, 0o600)
os.write(fd, json.dumps({"socket": socket, "log": lock + ".log"}).encode())
fcntl.flock(fd, fcntl.LOCK_EX)
if posix == "yes":
    fcntl.lockf(fd, fcntl.LOCK_SH)
print("held", flush=True)
time.sleep(60)
"""


def held_lock(tmp_path: Path, posix: str = "yes") -> tuple[subprocess.Popen[str], Path, Path]:
    lock, sock = tmp_path / "lock", tmp_path / "sock"
    sock.touch()
    argv = [sys.executable, "-I", "-S", "-c", HOLDER, str(lock), str(sock), posix]
    holder = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None
    with holder.stdout as out:
        assert out.readline() == "held\n"
    return holder, lock, sock


def a_share(tmp_path: Path, **changes: object) -> virtiofs_daemon.ServedDirectory:
    fields: dict[str, object] = {
        "source": str(tmp_path),
        "socket": str(tmp_path / "sock"),
        "lock": str(tmp_path / "lock"),
        "log": str(tmp_path / "log"),
        "uid": 1000,
        "gid": 1000,
        "groups": (1000, 2000),
        "subordinate_id": 100000,
        "readonly": False,
        "socket_owner": 64055,
        "owner_check": True,
    }
    return virtiofs_daemon.ServedDirectory(**(fields | changes))  # type: ignore[arg-type]


def test_map_is_guest_root_and_the_users_own_ids() -> None:
    assert user_daemon.id_map(100000, [1000]) == "0 100000 1\n1000 1000 1\n"


def test_neighbouring_ids_share_a_line() -> None:
    assert user_daemon.id_map(9, [5, 3, 4, 4, 7]) == "0 9 1\n3 3 3\n7 7 1\n"


@given(st.sets(st.integers(1, 2000), max_size=300))
def test_map_covers_exactly_the_ids(ids: set[int]) -> None:
    lines = [tuple(map(int, line.split())) for line in user_daemon.id_map(5000, ids).splitlines()]
    mapped = [(inner + i, outer + i) for inner, outer, n in lines for i in range(n)]
    assert sorted(mapped) == sorted([(0, 5000), *((i, i) for i in ids)])


@pytest.mark.parametrize(
    ("subordinate", "ids", "why"),
    [
        (100000, [0], "id 0"),
        (0, [1000], "id 0"),
        (1000, [1000], "subordinate id 1000"),
        (100000, [-1], "id -1"),
        (100000, [2**32 - 1], "id 4294967295"),
        (100000, list(range(2, 1000, 2)), "the limit is 340"),
    ],
)
def test_bad_maps_are_refused(subordinate: int, ids: list[int], why: str) -> None:
    with pytest.raises(HostFault, match=why):
        user_daemon.id_map(subordinate, ids)


def test_share_is_restored_from_its_json(tmp_path: Path) -> None:
    share = a_share(tmp_path)
    fields = json.loads(json.dumps(asdict(share)))
    assert virtiofs_daemon.ServedDirectory(**{**fields, "groups": tuple(fields["groups"])}) == share


def test_job_of_root_creates_no_share(tmp_path: Path) -> None:
    with pytest.raises(HostFault, match="id 0"):
        a_share(tmp_path, uid=0).start()
    assert list(tmp_path.iterdir()) == []


def test_long_socket_path_is_named(tmp_path: Path) -> None:
    share = a_share(tmp_path, socket=str(tmp_path / ("s" * 120)))
    with pytest.raises(HostFault, match="107 bytes"):
        share.start()
    user_daemon.stop(share.lock, time.monotonic() + 30)
    assert list(tmp_path.iterdir()) == []


def test_lock_that_is_a_symlink_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "lock").symlink_to(tmp_path / "target")
    with pytest.raises(HostFault, match="lock"):
        a_share(tmp_path).start()
    with pytest.raises(HostFault, match="lock"):
        user_daemon.stop(str(tmp_path / "lock"), time.monotonic() + 30)
    assert not (tmp_path / "target").exists()


def test_map_can_have_the_user_for_root() -> None:
    assert user_daemon.id_map(100000, [1000], 1000) == "0 1000 1\n100000 100000 1\n"
    assert user_daemon.id_map(9, [8, 10, 5], 5) == "0 5 1\n8 8 3\n"
    with pytest.raises(HostFault, match="subordinate id 9"):
        user_daemon.id_map(9, [5, 9], 5)


def a_daemon(tmp_path: Path, line_of_its_help: str) -> str:
    """Make a program that prints this when called with --help."""
    program = tmp_path / "virtiofsd"
    program.write_text(f'#!/bin/sh\n[ "$*" = --help ] && echo "{line_of_its_help}"\n')
    program.chmod(0o755)
    return str(program)


def test_rust_virtiofsd_maps_its_root_to_the_user(tmp_path: Path) -> None:
    program = a_daemon(tmp_path, "      --translate-uid <TRANSLATE_UID>")
    share = a_share(tmp_path, source="/home/u/a,b=c{source}", program=program, gid=1007)
    assert share.user_is_root
    assert share.argv(7) == (
        program,
        "--fd=7",
        "--rlimit-nofile=0",
        "--shared-dir=/mnt",
        "--sandbox=chroot",
        "--modcaps=-mknod:-setfcap",
        "--announce-submounts",
        "--xattrmap=:ok:all:user.:user.::unsupported:all:::",
        "--translate-uid=map:0:100000:1",
        "--translate-uid=map:1000:0:1",
        "--translate-gid=map:0:100000:1",
        "--translate-gid=map:1007:0:1",
    )


@pytest.mark.parametrize("kind", ["    -o sandbox=chroot", "    --translate-uid <UID>"])
def test_guest_root_can_be_the_user(tmp_path: Path, kind: str) -> None:
    share = a_share(tmp_path, program=a_daemon(tmp_path, kind), subordinate_id=None)
    assert share.user_is_root == share.translates_ids
    share = replace(share, guest_root="user")
    assert share.user_is_root
    words = [word for word in share.argv(7) if word.startswith("--translate")]
    assert (
        words == ["--translate-uid=map:0:0:1", "--translate-gid=map:0:0:1"] * share.translates_ids
    )
    assert user_daemon.id_map(None, [share.uid], share.uid) == f"0 {share.uid} 1\n"


def test_user_and_root_of_guest_can_both_be_the_owner(tmp_path: Path) -> None:
    program = a_daemon(tmp_path, "    --translate-uid <UID>")
    share = a_share(tmp_path, program=program, subordinate_id=None, guest_root="both", gid=1007)
    words = [word for word in share.argv(7) if word.startswith("--translate")]
    assert words == [
        "--translate-uid=guest:0:0:1", "--translate-uid=map:1000:0:1",
        "--translate-gid=guest:0:0:1", "--translate-gid=map:1007:0:1",
    ]  # fmt: skip


def test_virtiofsd_that_fails_to_print_help_does_not_map_root(tmp_path: Path) -> None:
    assert not a_share(tmp_path, program="/bin/false").user_is_root
    assert not a_share(tmp_path, program="/nonexistent").user_is_root


def test_arguments_contain_no_path_of_the_user(tmp_path: Path) -> None:
    program = a_daemon(tmp_path, "    -o sandbox=namespace|chroot")
    share = a_share(tmp_path, source="/home/u/a,b=c{source}", program=program)
    assert not share.user_is_root
    assert share.argv(7) == (
        program,
        "-f",
        "--fd=7",
        "--rlimit-nofile=0",
        "-o",
        "source=/proc/self/fd/{source}/.,sandbox=chroot,modcaps=-mknod:-setfcap,announce_submounts,"
        "no_posix_acl,"
        "xattrmap=:ok:all:user.:user.::ok:client:security.capability:::unsupported:all:::",
    )


def test_stop_kills_the_holder_of_the_lock(tmp_path: Path) -> None:
    holder, lock, sock = held_lock(tmp_path)
    user_daemon.stop(str(lock), time.monotonic() + 30)
    assert holder.wait(30) == -9
    assert not lock.exists()
    assert not sock.exists()
    user_daemon.stop(str(lock), time.monotonic() + 30)


def test_second_start_does_not_change_the_first(tmp_path: Path) -> None:
    holder, lock, sock = held_lock(tmp_path)
    with pytest.raises(HostFault, match="already runs"):
        a_share(tmp_path, lock=str(lock), socket=str(sock)).start()
    assert holder.poll() is None
    assert sock.exists()
    user_daemon.stop(str(lock), time.monotonic() + 30)
    holder.wait(30)


def test_unknown_lock_holder_is_a_host_fault_and_removes_nothing(tmp_path: Path) -> None:
    holder, lock, sock = held_lock(tmp_path, posix="no")
    with pytest.raises(HostFault, match="cannot be found"):
        user_daemon.stop(str(lock), time.monotonic() + 0.2)
    assert holder.poll() is None
    assert lock.exists()
    assert sock.exists()
    holder.kill()
    holder.wait(30)
    user_daemon.stop(str(lock), time.monotonic() + 30)
    assert not lock.exists()


@pytest.mark.parametrize("content", ["", '{"socket": "/tm', "[]"])
def test_lock_of_a_start_that_died_is_removed(tmp_path: Path, content: str) -> None:
    lock = tmp_path / "lock"
    lock.write_text(content)
    user_daemon.stop(str(lock), time.monotonic() + 30)
    assert not lock.exists()


def said_by(script: str) -> str:
    """Return the output of a new Python that runs this with the core to import."""
    core = Path(virtiofs_daemon.__file__).parents[2]
    program = f"import os, sys\nsys.path.insert(0, {str(core)!r})\n{textwrap.dedent(script)}"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_log_is_bounded() -> None:
    script = """
        from vtorque_core.resources import user_daemon
        log = user_daemon._create_log()
        os.write(log, b"begin")
        try:
            while True:
                os.write(log, b"x" * 4096)
        except PermissionError:
            print(len(user_daemon._log_text(log)) <= user_daemon.LOG_BYTES)
    """
    assert said_by(script) == "True\n"


def test_setgroups_succeeds_without_effect() -> None:
    script = """
        from vtorque_core.resources import _user_daemon_exec
        before = os.getgroups()
        _user_daemon_exec.ignore_setgroups()
        os.setgroups([4242])
        print(os.getgroups() == before, os.getpid() > 0)
    """
    assert said_by(script) == "True True\n"


def test_setuid_and_setgid_bits_cannot_be_set(tmp_path: Path) -> None:
    """Not by chmod(2); a file that is created with the bits loses them at the first write."""
    script = f"""
        import contextlib
        from vtorque_core.resources import _user_daemon_exec as daemon
        os.chdir({str(tmp_path)!r})
        os.umask(0o022)
        if os.getuid() == 0:
            os.setresuid(4242, 4242, 4242)
        daemon.refuse_setuid()
        file = os.open("file", os.O_CREAT | os.O_RDWR, 0o6755)
        os.write(file, b"x")
        print(oct(os.fstat(file).st_mode))
        directory = os.open(".", os.O_RDONLY)
        for mode in (0o1750, 0o4755, 0o2755, 0o6711):
            for call in (
                lambda: os.chmod("file", mode),
                lambda: os.fchmod(file, mode),
                lambda: os.chmod("file", mode, dir_fd=directory),
            ):
                with contextlib.suppress(PermissionError):
                    call()
                    print(oct(mode))
        print(oct(os.fstat(file).st_mode))
    """
    tmp_path.chmod(0o777)
    assert said_by(script).split() == ["0o100755", *["0o1750"] * 3, "0o101750"]


@pytest.mark.parametrize(
    ("ram_mib", "file_max", "limit"),
    [
        (64, 2_466_174, 100_000),  # the minimum, in which a small guest's cache has room
        (256, 2_466_174, 262_144),  # one per KiB of the guest's memory
        (4096, 2_466_174, 308_271),  # by default the kernel allows a file per 10 KiB of memory
        (4096, 400_000, 100_000),
        (512, 2**63 - 1, 524_288),  # systemd sets the largest possible number
        (65536, 2**63 - 1, 1_000_000),  # below fs.nr_open
    ],
)
def test_limit_of_files_depends_on_memory_and_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ram_mib: int, file_max: int, limit: int
) -> None:
    (tmp_path / "file-max").write_text(f"{file_max}\n")
    monkeypatch.setattr(virtiofs_daemon, "_FILE_MAX", tmp_path / "file-max")
    assert virtiofs_daemon.file_limit(ram_mib) == limit


LIMITS = """
import json, resource, sys
sys.path.append(sys.argv[1])
from vtorque_core.resources import _user_daemon_exec as program
hard, nofile, disk = int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
fields = dict.fromkeys(program.DaemonPlan._fields, 0)
plan = program.DaemonPlan(**fields | {"nofile": nofile, "disk": disk})
program.set_limits(plan)
kinds = (resource.RLIMIT_NOFILE, resource.RLIMIT_DATA)
print(json.dumps([resource.getrlimit(kind) for kind in kinds]))
"""


@pytest.mark.parametrize(
    ("hard", "nofile", "disk", "files", "memory"),
    [
        (5000, 2000, "", 2000, (256 << 20) + (2000 << 10)),
        (5000, 1_000_000, "", 5000, (256 << 20) + (1_000_000 << 10)),  # like a user's personal site
        (5000, 1024, "raw", 1024, 512 << 20),
    ],
)
def test_daemon_gets_as_many_descriptors_as_the_hard_limit_allows(
    hard: int, nofile: int, disk: str, files: int, memory: int
) -> None:
    """With a soft limit of 1024, as systemd gives, a guest could not keep 1,000 files open."""
    no_rights = ["setpriv", "--inh-caps=-all", "--bounding-set=-all", "--"]
    where = str(Path(_user_daemon_exec.__file__).parents[2])
    argv = [*(no_rights if os.getuid() == 0 else []), sys.executable, "-c", LIMITS, where]
    argv += [str(hard), str(nofile), disk]
    out = subprocess.run(argv, capture_output=True, check=True, text=True, timeout=180).stdout
    assert json.loads(out) == [[files, files], [memory, memory]]
