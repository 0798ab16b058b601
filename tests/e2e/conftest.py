"""A real node for all e2e tests: installed wheels, libvirt, micro image, embedded batch system.

``scripts/node up`` makes it, or returns at once if it is up; ``scripts/test`` takes it down.
"""

import json
import os
import pwd
import re
import shutil
import socket
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import patience
from users import TIMEOUT, remove_user, run

NAME = "vtorque-e2e"
REPO = Path(__file__).resolve().parents[2]
USER, OTHER = "vte2e1", "vte2e2"
GROUP = "vte2eg"
FAILED = pytest.StashKey[bool]()
TAP = "vt[0-9a-f]{12}"  # a guest's NIC on the host, and its packet filter


@dataclass
class Node:
    """The node under test and an unprivileged user on it."""

    prefix: Path = Path("/opt", NAME)
    config: Path = Path("/etc", NAME, "vtorque.toml")
    state: Path = Path("/var/lib", NAME)
    run_dir: Path = Path("/run", NAME)
    user: str = USER
    home: Path = field(default_factory=lambda: Path("/home", USER))

    def command(self, program, *argv):
        """Return a command line: of the prefix with the node's config, or any absolute path."""
        if program.startswith("/"):
            return [program, *argv]
        config = ["--config", str(self.config)] if program in ("vsub", "vmgr") else []
        return [str(self.prefix / "bin" / program), *config, *argv]

    def as_user(self, *argv, user=None, cwd=None, check=True, timeout=TIMEOUT, stdin=None, env=()):
        """Run a command of the prefix (or any absolute one) as the user, in their home."""
        who = user or self.user
        entry = pwd.getpwnam(who)
        environ = {
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "HOME": entry.pw_dir,
            "USER": who,
            "LOGNAME": who,
            "SHELL": "/bin/bash",
            "LANG": "C.UTF-8",
            **dict(env),
        }
        return run(
            *self.command(*argv),
            timeout=timeout,
            check=check,
            cwd=cwd or entry.pw_dir,
            env=environ,
            input=stdin,
            user=entry.pw_uid,
            group=entry.pw_gid,
            extra_groups=os.getgrouplist(who, entry.pw_gid),
            umask=0o022,
        )

    def root(self, *argv, check=True, timeout=TIMEOUT):
        """Run a command of the prefix as root; ``vsub`` and ``vmgr`` get the node's config."""
        environ = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
        return run(*self.command(*argv), check=check, timeout=timeout, env=environ, cwd="/")

    def script(self, text, name="job.sh"):
        """Write a job script into the user's home; return its name."""
        path = self.home / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        entry = pwd.getpwnam(self.user)
        os.chown(path, entry.pw_uid, entry.pw_gid)
        return name

    def job(self, text, *args, check=False, timeout=TIMEOUT, name="t"):
        """Run a job script to its end in a guest; return exit code, output, errors."""
        for old in ("out", "err"):
            (self.home / old).unlink(missing_ok=True)
        script = self.script(text)
        done = self.as_user(
            "vsub", "-W", "block=true", "-N", name, "-o", "out", "-e", "err", *args, script,
            check=check, timeout=timeout,
        )  # fmt: skip
        found = [self.home / name for name in ("out", "err")]
        return NodeJobResult(done, *(path.read_bytes() if path.exists() else b"" for path in found))

    def submit(self, text, *args):
        """Submit a job script; return the job's id without waiting."""
        done = self.as_user("vsub", "-N", "t", "-o", "out", "-e", "err", *args, self.script(text))
        return done.stdout.decode().strip()

    def job_shell(self, job):
        """Return the pid of a job's shell, which holds the job's lock file."""
        status = next((self.run_dir / "jobs").glob(f"{job}.*/jobshell.lock")).stat()
        device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
        held = [line.split() for line in Path("/proc/locks").read_text().splitlines()]
        (pid,) = {int(words[4]) for words in held if words[5] == f"{device}:{status.st_ino}"}
        return pid

    def footprint(self):
        """Return what a job could leave on the host, as comparable sets.

        Only what has vTorque's names or lies in this node's places: others work on this machine.
        """
        daemons = f"/{NAME}/.*(virtiofsd|qemu)|(virtiofsd|qemu).*/{NAME}/"
        tables = run("nft", "list", "tables").stdout.decode()
        mounts = Path("/proc/self/mounts").read_text().splitlines()
        ours = (f"{self.state}", f"{self.run_dir}", f"{self.home}")
        return {
            "domains": {
                name
                for name in run("virsh", "-q", "list", "--all", "--name").stdout.decode().split()
                if name.startswith("vt-")
            },
            "files": {
                str(Path(place, name))
                for top in (self.state / "jobs", self.state / "journal", self.run_dir / "jobs",
                            self.run_dir / "proof", self.run_dir / "locks")
                for place, directories, files in os.walk(top)  # skips entries that vanish
                for name in (*directories, *files)
            } | {str(path) for path in Path("/dev/shm").glob("vtorque-*")},
            "tables": set(re.findall(f"bridge {TAP}", tables)),
            "processes": set(run("pgrep", "-a", "-f", daemons, check=False).stdout.splitlines()),
            "mounts": {line for line in mounts if line.split()[1].startswith(ours)},
            "links": set(re.findall(rf"\b{TAP}\b", Path("/proc/net/dev").read_text())),
        }  # fmt: skip

    def left(self, before, seconds=TIMEOUT):
        """Return the footprint's remaining differences to the one before, after some seconds."""
        deadline = time.monotonic() + seconds
        begun = time.monotonic()
        while (after := self.footprint()) != before and time.monotonic() < deadline:
            patience.rest(begun, 0.2)
            begun = time.monotonic()
        return {kind: after[kind] ^ before[kind] for kind in before if after[kind] != before[kind]}

    def wait_for(self, condition, seconds=TIMEOUT, what="condition"):
        """Wait until ``condition()`` is true; return its value."""
        return patience.wait_for(condition, seconds, what)

    def running(self):
        """Return job key and domain name of the only running job."""
        (key,) = [path.name for path in (self.run_dir / "jobs").iterdir()]
        names = run("virsh", "-q", "list", "--name").stdout.decode().split()
        (domain,) = [each for each in names if each.startswith(f"vt-{key}-")]
        return key, domain

    def jobs(self, user=USER):
        """Return a user's jobs in the output of ``vmgr ps``."""
        return json.loads(self.as_user("vmgr", "ps", "--json", user=user).stdout)

    def state_of(self, job_id):
        """Return the batch system's state letter of a job, or None if it is unknown.

        Asks the service as ``vmgr ps`` does. Tests poll, and each vmgr takes 0.2 s of CPU time.
        """
        with socket.socket(socket.AF_UNIX) as service, service.makefile("rb") as answer:
            service.settimeout(TIMEOUT)
            service.connect(str(self.run_dir / "local.sock"))
            service.sendall(b'{"op": "list"}\n')
            jobs = json.loads(answer.readline())["jobs"]
        return next((job["state"] for job in jobs if job["id"] == job_id), None)

    def empty_home(self):
        """Remove all but hidden files from the user's home."""
        for path in self.home.iterdir():
            if not path.name.startswith("."):
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()

    def cancel_all(self):
        """End every job that a failed test has left: all later jobs would wait for it."""
        for user in (USER, OTHER):
            for job in self.jobs(user):
                self.as_user("vmgr", "cancel", job["id"], user=user, check=False)


@dataclass
class NodeJobResult:
    """Result and output of a job, read at once: the next job writes the same files."""

    done: subprocess.CompletedProcess
    out: bytes
    err: bytes

    @property
    def code(self):
        return self.done.returncode


@pytest.fixture(scope="session")
def node():
    """Return the node, made if it is not up."""
    assert os.geteuid() == 0, "e2e tests boot guests under libvirt's system daemon: run as root"
    up = subprocess.run(
        [REPO / "scripts/node", "up", "--name", NAME, "--subnet", "10.87.0.0/16"],
        capture_output=True, check=False, timeout=1100, text=True,
    )  # fmt: skip
    if up.returncode:
        pytest.fail(f"scripts/node up: {up.stdout}{up.stderr}")
    run("groupadd", "-f", GROUP)
    for name in (USER, OTHER):
        remove_user(name)
        run("useradd", "-m", "-s", "/bin/bash", name)
        Path("/home", name).chmod(0o700)
    run("usermod", "-aG", GROUP, USER)
    yield Node()
    for name in (USER, OTHER):
        remove_user(name)
    subprocess.run(["groupdel", GROUP], capture_output=True, check=False)


@pytest.fixture(scope="module", autouse=True)
def _empty_home():
    """Remove files of earlier tests from the user's home: they could start or end a job."""
    if Node().home.is_dir():
        Node().empty_home()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """Keep a test's failure for its fixtures."""
    report = yield
    if report.failed:
        item.stash[FAILED] = True
    return report


@pytest.fixture
def clean(node, request):
    """Fail the test if it leaves anything of a job on the host."""
    before = node.footprint()
    yield node
    if FAILED in request.node.stash:  # the steps that end its jobs may be missing: do not wait
        node.cancel_all()
        node.root("vtorque", "reap", "--config", str(node.config), check=False)
    if left := node.left(before):
        node.cancel_all()
        node.left(before)
    assert not left


@pytest.fixture
def guest(clean):
    """Return the node; the user's home is emptied afterwards."""
    yield clean
    clean.empty_home()


@pytest.fixture
def config(node):
    """Return a function that changes the site config until the test's end."""
    before = node.config.read_text()

    def change(table, line):
        text = node.config.read_text()
        head = f"[{table}]\n"
        new = text.replace(head, head + line + "\n") if head in text else f"{text}\n{head}{line}\n"
        node.config.write_text(new)

    yield change
    node.config.write_text(before)


@pytest.fixture
def no_deadline(config):
    """Let starts take an hour: a job that ends within the test's limit waited for no timeout."""
    config("node", "start_timeout = 3600")


@pytest.fixture
def two_slots(node):
    """Let the batch system run two jobs at once; its default is one."""

    def restart(*options):
        node.root("vtorque", "local", "stop", "--config", str(node.config))
        node.root("vtorque", "local", "serve", "--config", str(node.config), *options)

    restart("--slots", "2")
    yield
    restart()


@pytest.fixture
def scratch():
    """Return a directory for root's files of one test; other users can search it.

    Not below pytest's own, which only root may enter: opening that to others would affect the next
    test, and be undone by another run.
    """
    path = Path(tempfile.mkdtemp(prefix="vtorque-e2e-"))
    path.chmod(0o711)
    yield path
    shutil.rmtree(path, ignore_errors=True)
