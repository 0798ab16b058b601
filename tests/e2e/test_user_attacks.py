"""Users of the node attack root's processes and jobs of other users, from outside of guests.

Every test checks the state of the host afterwards. Attacks of root inside a guest:
``test_attacks.py``; input of users to root: ``test_user_input.py``.
"""

import base64
import contextlib
import json
import os
import pwd
import re
import stat
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from processes import open_files
from vtorque_core.config.site_file import Node
from vtorque_core.plan import host_ids

pytestmark = pytest.mark.e2e

SUBORDINATE, GUEST_UIDS = Node().subordinate_ids, Node().guest_uids
OTHER = "vte2e2"
PYTHON = "/usr/bin/python3"  # users cannot reach a checkout's file in a closed home


class Waiting:
    """A job that runs in a guest until the test ends it."""

    def __init__(self, node, *args):
        self.node = node
        for name in ("at", "go"):  # of an earlier test: this job would continue at once
            (node.home / name).unlink(missing_ok=True)
        self.pool = ThreadPoolExecutor(1)
        text = "#!/bin/sh\ntouch at\nwhile [ ! -e go ]; do sleep 0.1; done\n"
        self.job = self.pool.submit(node.job, text, *args)

    def wait(self):
        def there():
            assert not self.job.done(), self.job.result().err
            return (self.node.home / "at").exists()

        self.node.wait_for(there, what="a running job")

    def end(self):
        (self.node.home / "go").touch()
        result = self.job.result(90)
        self.pool.shutdown()
        return result


# Runs as a user; prints every attempt that was not refused.
PROBE = """
import glob, json, os, socket, sys
state, run, key, job, domain = sys.argv[1:6]
pids = sys.argv[6:]
got = []
def attempt(name, work):
    try:
        value = work()
    except (OSError, ValueError):
        return
    got.append(f"{name}: {str(value)[:80]}")
def connect(path):
    with socket.socket(socket.AF_UNIX) as s:
        s.settimeout(2); s.connect(path)
    return "connected"
def opened(path, flags=os.O_RDONLY):
    os.close(os.open(path, flags | os.O_NONBLOCK)); return "opened"
g, s = f"{run}/jobs/{key}/g0", f"{state}/jobs/{key}/g0"
for name in ("run", "status", "fs-home"):
    attempt(f"connect {name}", lambda: connect(f"{g}/{name}.sock"))
for path in (f"{run}/jobs", f"{run}/jobs/{key}", g, f"{state}/jobs", f"{state}/jobs/{key}", s,
             f"{state}/journal", f"{state}/local/jobs",
             f"{state}/kept", f"{state}/kept/0", f"{run}/locks"):
    attempt(f"list {path}", lambda: os.listdir(path))
    attempt(f"write into {path}", lambda: opened(f"{path}/x", os.O_WRONLY | os.O_CREAT))
for path in (f"{run}/proof", run, state, f"{state}/local", f"{state}/images",
             f"{state}/images/micro"):
    attempt(f"write into {path}", lambda: opened(f"{path}/x", os.O_WRONLY | os.O_CREAT))
for path in (f"{s}/seed.iso", f"{s}/console.log", f"{s}/overlay.qcow2", f"{state}/site.secret",
             f"{state}/journal/{key}.jsonl", f"{run}/proof/{job}.json",
             f"{run}/node.lock", f"{run}/locks/{job}", f"{state}/kept/.swept",
             f"{state}/local/service.log", f"{state}/local/counter", f"{g}/fs-home.lock",
             f"{g}/fs-home.log"):
    attempt(f"read {path}", lambda: opened(path))
    attempt(f"write {path}", lambda: opened(path, os.O_WRONLY))
    attempt(f"remove {path}", lambda: os.unlink(path))
for at in glob.glob("/var/lib/libvirt/qemu/domain-*") + ["/var/lib/libvirt/qemu"]:
    attempt(f"list {at}", lambda: os.listdir(at))
    attempt(f"monitor {at}", lambda: connect(f"{at}/monitor.sock"))
for pid in pids:
    attempt(f"kill {pid}", lambda: os.kill(int(pid), 0))
    for name in ("environ", "mem", "maps"):
        attempt(f"/proc/{pid}/{name}", lambda: opened(f"/proc/{pid}/{name}"))
    for name in ("root", "cwd", "exe", "fd/0", "fd/3", "fd/5", "ns/user"):
        attempt(f"/proc/{pid}/{name}", lambda: os.readlink(f"/proc/{pid}/{name}"))
print(json.dumps(got))
"""


def pids_of(node, key, domain):
    """Return pid to kind of the job's QEMU and of its share daemons."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes().split(b"\0")
                if f"guest={domain},".encode() in b" ".join(words):
                    found[int(entry.name)] = "qemu"
                elif words[0].endswith(b"/virtiofsd"):
                    held = open_files(entry.name)
                    if any(at.startswith(f"{node.run_dir}/jobs/{key}/") for at in held):
                        found[int(entry.name)] = "virtiofsd"
    return found


SOCKETS = ("run.sock", "status.sock", "fs-home.sock")
# Connects to sockets until SIGTERM or a timeout; prints the reached ones, and the number of
# others.
RACE = """
import os, signal, socket, sys, time
end, got, seen = time.monotonic() + float(sys.argv[1]), [], set()
def stop(*_):
    global end
    end = 0
signal.signal(signal.SIGTERM, stop)
pause, paths = float(sys.argv[2]), sys.argv[3:]
print("up", flush=True)
while time.monotonic() < end:
    time.sleep(pause)
    for path in paths:
        with socket.socket(socket.AF_UNIX) as s:
            try:
                s.setblocking(False); s.connect(path); got.append(path)
            except PermissionError:
                seen.add(path)
            except OSError:
                pass
print(sorted(set(got)), len(seen))
"""


def race(node, key, seconds, pause):
    """Start RACE as another user, with pauses between its attempts, on the sockets of a guest."""
    paths = [str(node.run_dir / "jobs" / key / "g0" / name) for name in SOCKETS]
    entry = pwd.getpwnam(OTHER)
    racer = subprocess.Popen(
        [PYTHON, "-I", "-c", RACE, str(seconds), str(pause), *paths], stdout=subprocess.PIPE,
        user=entry.pw_uid, group=entry.pw_gid, extra_groups=[], cwd="/",
    )  # fmt: skip
    assert racer.stdout.readline() == b"up\n"
    return racer


@pytest.fixture(scope="class")
def raced():
    """Return a list; ``running`` appends what another user's RACE printed during the start."""
    return []


@pytest.fixture(scope="class")
def running(node, raced):
    """Return a running job: node, its id, key, domain and processes."""
    before = node.footprint()
    waiting = Waiting(node)
    jobs = node.run_dir / "jobs"
    node.wait_for(lambda: [*jobs.glob("*")], what="the job's directory")
    racer = race(node, next(jobs.iterdir()).name, 3600, 0.001)
    waiting.wait()
    racer.terminate()
    raced.append(racer.communicate(timeout=180)[0])
    key, domain = node.running()
    job = key.rpartition(".")[0]
    yield node, job, key, domain, pids_of(node, key, domain)
    assert waiting.end().code == 0
    node.empty_home()
    assert not node.left(before)


def probe(node, who, job, key, domain, pids):
    argv = (str(node.state), str(node.run_dir), key, job, domain, *map(str, pids))
    done = node.as_user(PYTHON, "-I", "-c", PROBE, *argv, user=who)
    return json.loads(done.stdout)


class TestARunningJob:
    """Attacks on one running guest, which they do not change."""

    def test_other_user_cannot_access_a_running_job(self, running):
        node, job, key, domain, pids = running
        assert sorted(set(pids.values())) == ["qemu", "virtiofsd"]
        assert probe(node, OTHER, job, key, domain, pids) == []
        for argv, said in (
            (("vmgr", "cancel", job), b"you have no job with this id"),
            (("vmgr", "logs", "--console", job), b"has no running guest"),
            (("vmgr", "console", job), b"has no running guest"),
            (("vmgr", "ssh", job), b"this node has no readable records"),
            (("virsh", "-c", "qemu:///system", "destroy", domain), b"error:"),
            (("virsh", "-r", "-c", "qemu:///system", "list"), b""),
        ):
            program = "/usr/bin/virsh" if argv[0] == "virsh" else argv[0]
            done = node.as_user(program, *argv[1:], user=OTHER, check=False, timeout=180)
            if said:
                assert done.returncode != 0, argv
                assert said in done.stderr, (argv, done.stderr)
            assert b"Traceback" not in done.stderr, (argv, done.stderr)
        listed = json.loads(node.as_user("vmgr", "ps", "--json", user=OTHER).stdout)
        assert job not in [each["id"] for each in listed]

    def test_owner_of_a_job_can_reach_only_its_run_port(self, running):
        node, job, key, domain, pids = running
        got = set(probe(node, node.user, job, key, domain, pids))
        own = {pid for pid, kind in pids.items() if kind == "virtiofsd"}
        assert got == {
            "connect run: connected",
            f"read {node.run_dir}/proof/{job}.json: opened",
            f"read {node.state}/jobs/{key}/g0/console.log: opened",  # vmgr console
            *(f"kill {pid}: None" for pid in own),  # their own uid: see the next test
        }

    def test_jobshell_for_a_job_of_another_user_runs_nothing(self, running):
        node, job, *_ = running
        evil = Path("/home", OTHER, "ran")
        script = Path("/home", OTHER, "evil.sh")
        script.write_text(f"#!/bin/sh\ntouch {evil}\n")
        script.chmod(0o755)
        done = node.as_user(
            "vtorque", "jobshell", "--config", str(node.config),
            user=OTHER, check=False, stdin=f"{script}\n".encode(), env={"PBS_JOBID": job}.items(),
        )  # fmt: skip
        script.unlink()
        assert done.returncode not in (0, 42)
        assert b"vtorque: " in done.stderr and b"Traceback" not in done.stderr
        assert not evil.exists()

    def test_no_socket_is_open_to_other_users_while_the_job_starts(self, running, raced):
        assert raced == [f"[] {len(SOCKETS)}\n".encode()]

    def test_qemu_and_daemons_are_confined(self, running):
        node, _, _, _, pids = running
        user = pwd.getpwnam(node.user)
        masks = Path("/sys/class/net").glob("vt5254*/brport/group_fwd_mask")
        assert [mask.read_text() for mask in masks] == ["0xfffd\n"]
        for pid, kind in pids.items():
            proc = Path("/proc", str(pid))
            status = dict(
                re.findall(r"^(\w+):\s*(.*)$", (proc / "status").read_text(), re.MULTILINE)
            )
            uids = {int(uid) for uid in status["Uid"].split()}
            assert 0 not in uids, (kind, uids)
            assert uids <= (
                set(range(GUEST_UIDS, GUEST_UIDS + host_ids.COUNT))
                if kind == "qemu"
                else {user.pw_uid, SUBORDINATE + user.pw_uid}
            )
            assert 0 not in {int(gid) for gid in status["Gid"].split() + status["Groups"].split()}
            if kind == "qemu":
                assert int(status["CapEff"], 16) == 0
                assert status["Seccomp"] == "2"
            else:
                assert status["NoNewPrivs"] == "1" and status["Seccomp"] == "2"
                assert (proc / "ns/user").readlink() != Path("/proc/self/ns/user").readlink()
            environ = (proc / "environ").read_bytes()
            assert b"VTORQUE" not in environ and b"PBS_" not in environ
            held = open_files(proc.name)
            forbidden = ("/journal/", "/locks/", "node.lock", "site.secret", "/proof", "/local/")
            assert not [at for at in held if any(word in at for word in forbidden)], (kind, held)


@pytest.mark.full
def test_user_scripts_are_unreadable_for_other_users(guest):
    """Users with the same primary group can read the proof, but not the scripts."""
    script = guest.home / "mine.sh"
    script.write_text("#!/bin/sh\necho the-users-own-words\n")
    script.chmod(0o755)
    os.chown(script, pwd.getpwnam(guest.user).pw_uid, pwd.getpwnam(guest.user).pw_gid)
    waiting = Waiting(guest, "-vm", f"vm_prologue={script}")
    waiting.wait()
    key, _ = guest.running()
    other, group = pwd.getpwnam(OTHER).pw_uid, pwd.getpwnam(guest.user).pw_gid
    proof = guest.run_dir / "proof" / f"{key.rpartition('.')[0]}.json"
    mine = guest.run_dir / "jobs" / key / "vm_prologue"
    read = {
        path: subprocess.run(
            ["cat", path], user=other, group=group, extra_groups=[], capture_output=True,
            check=False, timeout=180,
        )
        for path in (proof, mine)
    }  # fmt: skip
    status = mine.stat()
    result = waiting.end()
    assert result.out == b"the-users-own-words\n"
    assert (read[proof].returncode, b"own-words" in read[proof].stdout) == (0, False)
    assert base64.b64encode(b"the-users")[:12] not in read[proof].stdout
    assert b"Permission denied" in read[mine].stderr and not read[mine].stdout
    # Owned by root, who lets the user read it: they cannot make it larger. The group bits of the
    # mode
    # show the mask of its access list.
    assert (status.st_uid, stat.S_IMODE(status.st_mode)) == (0, 0o440)


# Runs with the ids of one guest's QEMU; prints the files and processes that it could access.
BROKEN_OUT = """
import json, os, socket, sys
pid, got = int(sys.argv[1]), []
def attempt(name, work):
    try:
        work()
    except OSError:
        return
    got.append(name)
def opened(path):
    os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
def connected(path):
    with socket.socket(socket.AF_UNIX) as s:
        s.settimeout(2); s.connect(path)
for path in sys.argv[2:]:
    attempt(path, lambda: opened(path))
    attempt(path, lambda: connected(path))
attempt("kill", lambda: os.kill(pid, 0))
attempt("memory", lambda: opened(f"/proc/{pid}/mem"))
print(json.dumps(got))
"""


def test_qemu_process_cannot_open_files_of_other_guests(guest):
    waiting = Waiting(guest, "-vm", "vms_per_node=2")
    waiting.wait()
    (key,) = (path.name for path in (guest.run_dir / "jobs").iterdir())
    listed = subprocess.run(
        ("virsh", "list", "--name"), capture_output=True, text=True, check=True, timeout=180
    )
    names = sorted(name for name in listed.stdout.split() if key in name)
    pids = [int(Path(f"/run/libvirt/qemu/{name}.pid").read_text()) for name in names]
    status = [Path(f"/proc/{pid}").stat() for pid in pids]
    assert status[0].st_uid != status[1].st_uid
    theirs = []
    for number, name in enumerate(names):
        tops = [top / "jobs" / key / f"g{number}" for top in (guest.state, guest.run_dir)]
        number_of = ("virsh", "domid", name)
        known = subprocess.run(number_of, capture_output=True, text=True, check=True, timeout=180)
        tops += Path("/var/lib/libvirt/qemu").glob(f"domain-{known.stdout.strip()}-*")
        found = [str(path) for top in tops for path in top.rglob("*") if not path.is_dir()]
        assert any(path.endswith("monitor.sock") for path in found), found
        theirs.append(found)

    def reached(victim):
        argv = (PYTHON, "-I", "-c", BROKEN_OUT, str(pids[victim]), *theirs[victim])
        done = subprocess.run(
            argv, user=status[0].st_uid, group=status[0].st_gid,
            extra_groups=[status[0].st_gid], capture_output=True, check=True, timeout=180,
        )  # fmt: skip
        return json.loads(done.stdout)

    own = {path.rpartition("/")[2] for path in reached(0)}
    assert {"kill", "seed.iso", "master-key.aes"} <= own, own
    assert reached(1) == []
    assert waiting.end().code == 0


@pytest.mark.full
def test_killed_share_daemon_affects_only_the_job_of_its_user(guest):
    waiting = Waiting(guest)
    waiting.wait()
    key, domain = guest.running()
    pids = pids_of(guest, key, domain)
    doomed = [str(pid) for pid, kind in pids.items() if kind == "virtiofsd"]
    guest.as_user("/bin/kill", "-9", *doomed)
    job = json.loads(guest.as_user("vmgr", "ps", "--json").stdout)[0]["id"]
    guest.as_user("vmgr", "cancel", job)
    assert waiting.end().code != 0
    assert guest.job("#!/bin/sh\necho next\n").out == b"next\n"


@pytest.mark.full
def test_no_socket_is_open_to_other_users_in_repeated_starts(guest):
    """libvirt binds the ports' sockets before root gives them to their owner."""
    first = guest.submit("#!/bin/sh\nexit 0\n")
    guest.wait_for(lambda: guest.state_of(first) is None, what="first job's end")
    number, _, host = first.partition(".")
    racer = race(guest, f"{int(number) + 1}.{host}.0", 12, 0)
    second = guest.submit("#!/bin/sh\nsleep 3\n")
    assert second == f"{int(number) + 1}.{host}"
    out, _ = racer.communicate(timeout=180)
    guest.wait_for(lambda: guest.state_of(second) is None, what="second job's end")
    assert out == f"[] {len(SOCKETS)}\n".encode()
