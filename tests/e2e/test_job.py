"""A job script runs in a real guest as if it had run on the host, and leaves nothing behind."""

import hashlib
import os
import platform
import pwd
import re

import pytest

from vtorque_core.config.site_file import Node

pytestmark = pytest.mark.e2e

LONG = (pytest.mark.full, pytest.mark.releases)
HARMLESS = "t\"'<&>$(id)`;|*?[]{}\\%"


@pytest.mark.parametrize("mib", [20, pytest.param(100, marks=pytest.mark.full)])
def test_readme_job_runs(clean, mib):
    """Exit code, exact output bytes, identity, kernel, home; a large file and a large output."""
    data, half = os.urandom(1 << 20) * mib, mib << 19
    (clean.home / "in.bin").write_bytes(data)
    (clean.home / "in.bin").chmod(0o644)
    result = clean.job(
        "#!/bin/bash\n"
        'printf "out\\0\\377\\n"; printf "err\\n" >&2\n'
        "id -u; id -g; id -un; pwd; echo $HOME; uname -r; ls /home; nproc\n"
        f"sha256sum < in.bin >&2\nhead -c {half} in.bin && exit 42\n",
        "-vm", "vcpus=2,ram=512M",
    )  # fmt: skip
    (clean.home / "in.bin").unlink()
    assert result.code == 42
    assert result.err.decode() == f"err\n{hashlib.sha256(data).hexdigest()}  -\n"
    head, *lines, large = result.out.split(b"\n", 9)
    assert head == b"out\0\xff"
    uid, gid, name, cwd, home, kernel, homes, cpus = (line.decode() for line in lines)
    entry = clean.home.stat()
    assert (int(uid), int(gid), name) == (entry.st_uid, entry.st_gid, clean.user)
    assert cwd == home == str(clean.home)
    assert kernel != platform.release()
    assert homes == clean.user
    assert cpus == "2"
    assert len(large) == half
    assert hashlib.sha256(large).digest() == hashlib.sha256(data[:half]).digest()


def test_groups_umask_environment_limits_and_signals_match_the_host(clean):
    """The user's prologue runs before the script, and the epilogue after it has been killed.

    Quotes, XML and shell characters of the job's name reach libvirt, journal and files as text.

    For other exit codes see test_local_contract.py.
    """
    for name in ("pro.sh", "epi.sh"):
        clean.script(f"#!/bin/sh\necho {name} $(id -un)\n", name)
    result = clean.job(
        "#!/bin/bash\nid -Gn | tr ' ' '\\n' | sort | tr '\\n' ' '; echo\n"
        "umask; echo $X; echo $DISTRO $PBS_O_WORKDIR \"$PBS_JOBNAME\"; ulimit -n\n"
        "kill -TERM $$\n",
        "-v", "X=a b=c", "-vm", "vm_prologue=pro.sh,vm_epilogue=epi.sh", name=HARMLESS,
    )  # fmt: skip
    assert result.code == 143
    first, groups, umask, x, words, files, last = result.out.decode().splitlines()
    assert (first, last) == (f"pro.sh {clean.user}", f"epi.sh {clean.user}")
    assert groups.split() == ["vte2e1", "vte2eg"]
    assert umask == "0077"
    assert x == "a b=c"
    assert words == f"SLG {clean.home} {HARMLESS}"
    assert int(files) > 0


SIZE = (
    "#!/bin/sh\n"
    "echo $(nproc) $(grep -c processor /proc/cpuinfo) $(grep -c . $PBS_NODEFILE)"
    " $(sort -u $PBS_NODEFILE | grep -c .)\n"
    "echo $PBS_NUM_PPN $PBS_NP $PBS_NUM_NODES\n"
    "awk '/MemTotal/ { print int($2 / 1024) }' /proc/meminfo\n"
    "hostname; echo $PBS_NODEFILE; cat $PBS_NODEFILE\n"
    "for name in $(sort -u $PBS_NODEFILE); do grep -w $name /etc/hosts || exit 1; done\n"
)


@pytest.mark.parametrize(
    ("more", "cpus", "guests", "mib"),
    [
        pytest.param((), 2, 1, 900 - 256, id="whole allocation", marks=LONG),
        pytest.param(("-vm", "vms_per_node=2"), 1, 2, 450 - 256, id="two guests"),
        pytest.param(
            ("-vm", "vcpus=1,ram=200M"), 1, 1, 200, id="part of the allocation", marks=LONG
        ),
    ],
)
def test_guest_resources_match_the_allocation_and_batch_variables(clean, more, cpus, guests, mib):
    """The script is unchanged; this site requires a RAM size, so a -vm key is needed."""
    ram = () if "ram" in str(more) else ("-vm", "ram=job")
    result = clean.job(SIZE, "-l", "nodes=1:ppn=2,mem=900mb", *ram, *more)
    assert result.code == 0, result.err
    *first, name, path = result.out.decode().splitlines()[:5]
    rest = result.out.decode().splitlines()[5:]
    numbers = [[int(word) for word in line.split()] for line in first]
    assert numbers[0] == [cpus, cpus, cpus * guests, guests]
    assert numbers[1] == [cpus, cpus * guests, guests]
    assert mib * 3 // 4 < numbers[2][0] < mib, "not the RAM without the kernel's part"
    # The node file has the same path as on the host, and names guests that resolve.
    host = platform.node().split(".")[0]
    names = [f"v{host}-{index}" for index in range(guests)] if guests > 1 else [f"v{host}"]
    assert name == names[0]
    assert re.fullmatch(r"/var/spool/torque/aux/\d+\.\S+", path)
    files, hosts = rest[: cpus * guests], [line.split() for line in rest[cpus * guests :]]
    assert files == [each for each in names for _ in range(cpus)]
    assert [words[1] for words in hosts] == names
    assert len({words[0] for words in hosts}) == guests


def test_walltime_reaches_a_script_from_standard_input_as_term(clean):
    text = (
        b"#!/bin/bash\ntrap 'echo got TERM; exit 7' TERM\necho started\n"
        b"for i in $(seq 600); do sleep 0.1; done\n"
    )
    job = ("vsub", "-W", "block=true", "-o", "out", "-e", "err", "-l", "walltime=00:00:06")
    done = clean.as_user(*job, stdin=text, check=False)
    assert (clean.home / "out").read_bytes() == b"started\ngot TERM\n"
    assert done.returncode != 0


@pytest.mark.full
@pytest.mark.releases
def test_keep_leaves_the_guest_until_the_job_is_ended(clean):
    job = clean.submit("#!/bin/sh\necho done > ended\nexit 4\n", "-vm", "keep=true")
    ended = clean.home / "ended"
    clean.wait_for(ended.exists, what="the script's end")
    ended.unlink()
    err = clean.home / "err"
    clean.wait_for(lambda: b"keep=true" in err.read_bytes(), what="the notice")
    assert f"(vmgr ssh {job}, vmgr cancel {job})".encode() in err.read_bytes()
    assert clean.state_of(job) == "R"
    assert b"READY" not in clean.root("vmgr", "logs", "--console", job).stdout
    assert clean.as_user("vmgr", "logs", "--console", job).returncode == 0, (
        "the owner cannot read the console"
    )
    clean.as_user("vmgr", "cancel", job)
    clean.wait_for(lambda: clean.state_of(job) in (None, "C"), what="the job's end")


@pytest.mark.full
@pytest.mark.releases
def test_failing_vm_prologue_fails_the_job_and_prints_its_output(clean):
    clean.script("#!/bin/sh\necho no licence; exit 9\n", "pro.sh")
    result = clean.job("#!/bin/sh\necho script\n", "-vm", "vm_prologue=pro.sh")
    assert result.code != 0
    assert b"no licence" in result.out + result.err
    assert b"script" not in result.out


def test_files_left_by_guest_root_are_removed(clean):
    user = pwd.getpwnam(clean.user)
    left = clean.home / "left"
    for path in (left / "sub" / "file", left / "kept" / "file"):
        path.parent.mkdir(parents=True)
        path.write_text("")
    for path in (left, *left.rglob("*")):
        os.chown(
            path,
            Node().subordinate_ids + user.pw_uid,
            Node().subordinate_ids + user.pw_uid,
        )
    mine = left / "kept" / "mine"
    mine.write_text("")
    os.chown(mine, user.pw_uid, user.pw_gid)
    assert clean.as_user("/usr/bin/rm", "-r", left, check=False).returncode != 0
    clean.as_user("vmgr", "clean", "left", "--", "-W", "block=true", "-j", "oe", "-o", "out")
    assert (clean.home / "out").read_text() == f"{left}: all remaining files are yours\n"
    assert sorted(left.rglob("*")) == [left / "kept", mine]
    clean.as_user("/usr/bin/rm", "-r", left)


def test_bare_metal_job_runs_with_the_same_command(clean):
    result = clean.job("#!/bin/sh\nuname -r\n", "-vm", "none")
    assert result.out.decode().strip() == platform.release()
