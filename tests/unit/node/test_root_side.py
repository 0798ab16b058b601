"""Input that root trusts: proofs, configs, plugins, links, environment."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import pty
import socket
import stat
import subprocess
import sys
import tty

import pytest
from importlib_metadata import EntryPoint

from patience import eventually
from vtorque_core.api.job_files import File
from vtorque_core.base import names, safefs, trust
from vtorque_core.base.errors import EXIT_NO_PROOF, ConfigError, HostFault
from vtorque_core.base.names import JobAttempt, Paths
from vtorque_core.config import plugins
from vtorque_core.node.end import epilogue
from vtorque_core.node.shell import proof
from vtorque_core.node.shell.proof import Proof
from vtorque_core.records.journal import Journal
from vtorque_core.records.reading import JobHeader
from vtorque_local.submitter import LocalSubmitter

ME = os.getuid()

READY = Proof(JobAttempt("42.srv", 0, "u", ME), "ready", guest_type="linux", plugin="linux-guest")


@pytest.fixture
def paths(tmp_path):
    tmp_path.chmod(0o755)
    return names.Paths(tmp_path, tmp_path)


@pytest.mark.parametrize(
    ("uid", "job", "words"),
    [
        (ME + 1, "42.srv", "belongs to job '42.srv' of uid"),  # copied from another user
        (ME, "43.srv", "belongs to job '43.srv' of uid"),  # of another own job
        (ME, "42.srv\n", "belongs to job '42.srv\\n' of uid"),
    ],
)
def test_proof_of_another_job_or_user_is_refused(paths, uid, job, words):
    proof.write(paths, Proof(JobAttempt(job, 0, "u", uid), "ready"))
    proofs = paths.proof("42.srv")
    paths.proof(job).rename(proofs)
    with pytest.raises(HostFault) as caught:
        proof.read(paths, "42.srv", ME, owner_uid=ME)
    assert words in str(caught.value) and str(caught.value).isprintable()


def test_proof_written_by_the_user_is_refused(paths):
    proof.write(paths, READY)
    with pytest.raises(HostFault, match=f"belongs to uid {ME}, not {ME + 1}"):
        proof.read(paths, READY.job.id, ME, owner_uid=ME + 1)


def test_jobshell_with_a_config_of_the_user_runs_nothing(tmp_path):
    """A user can name another config, and so other directories, whose files are not root's."""
    owner = ME or 65534
    ran, config, script = tmp_path / "ran", tmp_path / "evil.toml", tmp_path / "script"
    config.write_text(f'[paths]\nrun = "{tmp_path}/run"\nstate = "{tmp_path}/state"\n')
    script.write_text(f"#!/bin/sh\ntouch {ran}\n")
    there = names.Paths(tmp_path / "state", tmp_path / "run")
    there.run.mkdir()
    proof.write(there, READY)
    for path in (there.run, there.proof("x").parent, there.proof(READY.job.id)):
        os.chown(path, owner, -1)
    done = subprocess.run(
        [sys.executable, "-I", "-m", "vtorque_core.cli.vtorque", "jobshell", "--config", config],
        input=f"{script}\n", capture_output=True, text=True, timeout=180, check=False,
        env={"PBS_JOBID": READY.job.id}, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == EXIT_NO_PROOF
    assert f"belongs to uid {owner}, not 0" in done.stderr
    assert not ran.exists()


def test_link_created_in_between_is_not_followed(tmp_path):
    """A user who can write a directory can swap names; root's directory is not writable."""
    tmp_path.chmod(0o755)
    target = tmp_path / "target"
    target.write_text("root's")
    (tmp_path / "link").symlink_to(target)
    with pytest.raises(FileExistsError):
        safefs.write_new(str(tmp_path / "link"), b"x", mode=0o644)
    safefs.replace(str(tmp_path / "link"), b"new", mode=0o600)
    assert target.read_text() == "root's" and not (tmp_path / "link").is_symlink()
    (tmp_path / ".file.new").symlink_to(target)  # where replace() writes first
    safefs.replace(str(tmp_path / "file"), b"x", mode=0o600)
    assert target.read_text() == "root's"
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o600
    (tmp_path / "tree").symlink_to(tmp_path, target_is_directory=True)
    safefs.remove_tree(str(tmp_path / "tree"))
    assert target.exists()
    tmp_path.chmod(0o777)
    with pytest.raises(HostFault, match="can be written by others"):
        safefs.write_new(str(tmp_path / "other"), b"x", mode=0o644)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root has to disbelieve a config")
def test_epilogue_rejects_a_config_that_others_can_write(tmp_path, monkeypatch, capsys):
    """The config names the directory of the journals, by which root removes files."""
    tmp_path.chmod(0o755)
    evil, honest = (names.Paths(tmp_path / x / "state", tmp_path / x / "run") for x in "eh")
    for paths in (evil, honest):
        paths.journal.mkdir(parents=True)
        paths.run.mkdir()
    victim = tmp_path / "victim"
    with Journal.start(evil, JobHeader(JobAttempt("1.x", 0, "u", ME), "local")) as journal:
        journal.acquire(File(str(victim), content=b"root's"), plugin="core", phase="boot")
    config = tmp_path / "vtorque.toml"
    config.write_text(f'[paths]\nstate = "{evil.state}"\nrun = "{evil.run}"\n')
    config.chmod(0o666)
    monkeypatch.setattr(epilogue, "Paths", lambda: honest)
    assert epilogue.run(config, "1.x") == 0
    assert victim.exists()
    assert "can be written by others than root" in capsys.readouterr().err
    config.chmod(0o644)
    assert epilogue.run(config, "1.x") == 0
    assert not victim.exists()


# -- plugins --------------------------------------------------------------------------------------


def test_package_that_others_can_write_is_not_imported(tmp_path, monkeypatch):
    """find_spec("a.b") imports a: root would have run the package before refusing it."""
    tmp_path.chmod(0o755)
    package = tmp_path / "vtorque_evil"
    package.mkdir()
    source = f"import os\nopen({str(tmp_path / 'ran')!r}, 'w').write(str(os.getuid()))\n"
    (package / "__init__.py").write_text(source)
    (package / "plugin.py").write_text("")
    package.chmod(0o777)
    monkeypatch.syspath_prepend(str(tmp_path))
    if ME != 0:  # accepted by the check beside root; the directories above are root's or sticky
        check = trust.require_root_owned
        monkeypatch.setattr(trust, "require_root_owned", lambda path, **_: check(path, uid=ME))
    with pytest.raises(ConfigError, match=r"vtorque_evil: can be written by others than root"):
        plugins.require_trusted(EntryPoint("evil", "vtorque_evil.plugin", "vtorque1.node"))
    assert not (tmp_path / "ran").exists()
    package.chmod(0o755)
    (package / "plugin.py").chmod(0o666)
    with pytest.raises(ConfigError, match=r"plugin\.py: can be written by others than root"):
        plugins.require_trusted(EntryPoint("evil", "vtorque_evil.plugin", "vtorque1.node"))
    (package / "plugin.py").chmod(0o644)
    plugins.require_trusted(EntryPoint("good", "vtorque_evil.plugin", "vtorque1.node"))
    assert not (tmp_path / "ran").exists()
    assert "vtorque_evil" not in sys.modules


def test_no_hook_waits_for_rarely_used_imports():
    """Each start and each end of a job imports the acting modules of all plugins."""
    code = """
import sys
import vtorque_core.node.start.prologue, vtorque_core.node.end.epilogue
from vtorque_core.config.plugins import entry_points, owner
points = [point for point in entry_points("vtorque1.node") if "vtorque-" in owner(point)]
for point in points:
    point.load()
print(len(points), *sys.modules)
"""
    argv = [sys.executable, "-I", "-c", code]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=180)
    number, *modules = done.stdout.split()
    assert int(number) > 10
    few = {"asyncio", "click", "http", "importlib.metadata", "vtorque_survive.drain"}
    assert not few & set(modules)


# -- The service -----------------------------------------------------------------------------------


def test_batch_service_closes_files_of_its_starter(tmp_path):
    """A lock or pipe of the starter must not be held for the service's lifetime."""
    tmp_path.chmod(0o755)
    config, lock = tmp_path / "vtorque.toml", tmp_path / "held"
    config.write_text(f'[paths]\nrun = "{tmp_path}/run"\nstate = "{tmp_path}/state"\n')
    command = [sys.executable, "-I", "-m", "vtorque_core.cli.vtorque", "local"]
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    subprocess.run(
        [*command, "serve", "--config", config],
        check=True, timeout=180, pass_fds=[descriptor], cwd=tmp_path,
    )  # fmt: skip
    try:
        os.close(descriptor)
        with lock.open() as again:
            fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        subprocess.run([*command, "stop", "--config", config], check=True, timeout=180)


@pytest.mark.root
def test_hook_uses_a_fixed_environment():
    """LIBVIRT_LOG_OUTPUTS once made root write a file of that name."""
    probe = (
        "import json, os\nfrom vtorque_core.cli import hook\n"
        "def probe(config, argv, environ):\n"
        "    print(json.dumps([dict(os.environ), environ, os.umask(0)]))\n"
        "    return 0\n"
        "hook.prologue = probe\nhook.run(['hook', 'prologue'])\n"
    )
    hostile = {
        "LIBVIRT_LOG_OUTPUTS": "1:file:/etc/cron.d/x", "LIBVIRT_DEFAULT_URI": "test:///default",
        "LD_LIBRARY_PATH": "/x", "TMPDIR": "/x", "PATH": "/x", "HOME": "/x", "PBS_JOBID": "1.x",
        "GCONV_PATH": "/x", "VTORQUE_CONFIG": "/x",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-I", "-c", probe],
        env=hostile,
        capture_output=True,
        check=True,
        timeout=180,
    )
    own, given, umask = json.loads(done.stdout)
    assert own == {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8", "HOME": "/root"}
    assert given.items() >= hostile.items()
    assert umask == 0o077


SERVE = """
import pwd, sys; from pathlib import Path
account = pwd.getpwuid  # nobody has no home and no shell
pwd.getpwuid = lambda uid: pwd.struct_passwd((*account(uid)[:5], "/", "/bin/sh"))
from vtorque_local.mom import JobPrograms
from vtorque_local.service import LocalService, Setup
top = Path(sys.argv[1])
service = LocalService(Setup(top / "run", top / "spool", JobPrograms(["/bin/true"], ["/bin/true"],
                        ["/bin/true"]), ["/bin/true"], slots=1, root_jobs=True))
service.open()
print("up", flush=True)
service.serve()
"""


def submit(run, argv, script=b"", fds=()):
    """Submit a bare-metal job manually; return the connection, with its answer unread."""
    message = {"op": "submit", "argv": ["-S", "/bin/sh", *argv], "token": "", "cwd": "/tmp"}
    message |= {"environ": {}, "script": base64.b64encode(script).decode()}
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(180)
    sock.connect(str(run / "local.sock"))
    socket.send_fds(sock, [json.dumps(message).encode() + b"\n"], fds)
    return sock


def test_job_of_a_disconnected_client_gets_no_other_terminal(tmp_path):
    """The next client reuses the numbers of descriptors that closed while the job was queued."""
    tmp_path.chmod(0o755)
    service = subprocess.Popen([sys.executable, "-c", SERVE, tmp_path], stdout=subprocess.PIPE)
    assert service.stdout is not None
    assert service.stdout.readline() == b"up\n"
    run, go = tmp_path / "run", tmp_path / "go"
    (keyboard, stdin), (screen, stdout), (spare, stderr) = (pty.openpty() for _ in range(3))
    for terminal in (stdin, stdout, stderr):
        tty.setraw(terminal)
    wait = f"touch {tmp_path}/began; while [ ! -e {go} ]; do sleep 0.05; done\n".encode()
    submitter = LocalSubmitter(Paths(run=run))

    try:
        with submit(run, ["-o", os.devnull, "-e", os.devnull], wait) as first:
            assert b'"id"' in first.recv(4096)
            eventually((tmp_path / "began").exists)  # with all its descriptors
            with submit(run, ["-I"], fds=[stderr] * 3):
                eventually(lambda: len(list(submitter.jobs())) == 2)
            # Left with the answer unread: the service sees an error, not an end.
            eventually(lambda: len(list(submitter.jobs())) == 1)
            with submit(run, ["-I"], fds=[stdin, stdout, stderr]) as victim:
                mine = json.loads(victim.recv(4096))["id"]
                os.write(keyboard, b"echo $PBS_JOBID; exit\n")
                go.touch()
                assert os.read(screen, 4096).decode().strip() == mine
    finally:
        service.terminate()
        service.wait(180)
        service.stdout.close()
        for descriptor in (keyboard, screen, spare, stdin, stdout, stderr):
            os.close(descriptor)
