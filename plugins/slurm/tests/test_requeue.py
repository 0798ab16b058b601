"""``scontrol requeue`` in a guest: the program, with a terminal as virtio port, and its helper."""

import os
import pty
import shutil
import signal
import socket
import subprocess
import sys
import threading
import tty
from dataclasses import replace

import pytest

from slurm_doubles import SlurmDoubles
from vtorque_core.api import JobAttempt, Paths
from vtorque_slurm import batch_commands, inside_guests, plugin, requeue_helper, requeue_port
from vtorque_slurm.settings import Settings
from vtorque_testing.harness import PluginSite
from vtorque_testing.planned import guest_plan

SHELLS = [["busybox", "sh"], ["dash"], ["bash", "--posix"]]  # the first is micro's
ELEMENT = {"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}


class Guest:
    """A guest's files and a virtio port; ``host`` is the port's end on the node."""

    def __init__(self, top, shell):
        self.top, self.shell = top, shell
        self.host, self.guest = pty.openpty()
        tty.setraw(self.guest)
        for name in ("scontrol", "requeue"):
            (top / name).write_bytes(inside_guests.program(name))
            (top / name).chmod(0o755)
        (top / "bin").mkdir()
        (top / "bin/sh").symlink_to(shutil.which(shell[0]))
        for number, name in ((1, "org.vtorque.run"), (2, requeue_port.PORT)):
            place = top / f"class/virtio-ports/vport0p{number}"
            place.mkdir(parents=True)
            (place / "name").write_text(f"{name}\n")
        (top / "vport0p2").symlink_to(os.ttyname(self.guest))

    def start(self, *words, environ=ELEMENT):
        places = {"VTORQUE_SYS": self.top, "VTORQUE_DEV": self.top}
        places["VTORQUE_SLURM_REQUEUE"] = self.top / "requeue"
        return subprocess.Popen(
            [*self.shell, self.top / "scontrol", *words], text=True,
            env={"PATH": "/usr/bin:/bin"} | places | environ,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip

    def run(self, *words, **more):
        process = self.start(*words, **more)
        _, error = process.communicate(timeout=120)
        return process.returncode, error

    def request(self):
        """Return the number in the guest's next request."""
        word, number = os.read(self.host, 100).split()
        assert word == b"requeue"
        return number

    def answer(self, text):
        os.write(self.host, text + b"\n")


@pytest.fixture(params=SHELLS, ids=lambda shell: shell[0])
def guest(request, tmp_path):
    if shutil.which(request.param[0]) is None:
        pytest.fail(f"{request.param[0]}: not installed")
    guest = Guest(tmp_path, request.param)
    yield guest
    os.close(guest.host)
    os.close(guest.guest)


@pytest.mark.parametrize("job_id", ["9", "7_2"])
def test_guest_requests_requeue_of_its_own_job(guest, job_id):
    process = guest.start("requeue", job_id)
    number = guest.request()
    guest.answer(b"1%s 1 an answer to another request" % number)
    guest.answer(b"%s 0" % number)
    assert process.communicate(timeout=120)[1] == ""
    assert process.returncode == 0


@pytest.mark.parametrize("job_id", ["7", "8", "7_1", "7_2,7_3", "all", ""])
def test_guest_refuses_to_requeue_another_job(guest, job_id):
    code, error = guest.run("requeue", job_id)
    assert code == 1
    assert "is not this job (9): requeue other jobs on a login node" in error
    os.set_blocking(guest.host, False)
    with pytest.raises(BlockingIOError):
        os.read(guest.host, 1)


def test_guest_prints_why_the_node_did_not_requeue(guest):
    process = guest.start("requeue", "9")
    guest.answer(b"%s 1 scontrol: exit code 1: disabled" % guest.request())
    error = process.communicate(timeout=120)[1]
    assert process.returncode == 1
    assert error == "scontrol: error: requeue: scontrol: exit code 1: disabled\n"


def test_term_to_the_job_does_not_lose_the_answer(guest):
    """Slurm sends TERM to all processes of a requeued job, also before the answer."""
    process = guest.start("requeue", "9")
    number = guest.request()
    found = subprocess.run(["pgrep", "-s", str(process.pid)], capture_output=True, check=True)
    for pid in found.stdout.split():
        os.kill(int(pid), signal.SIGTERM)
    guest.answer(b"%s 0" % number)
    assert process.communicate(timeout=120)[1] == ""
    assert process.returncode == 0


def test_requeue_is_refused_without_program_port_or_job(guest):
    assert guest.run("requeue", "9", environ={})[1] == (
        "scontrol: error: requeue: SLURM_JOB_ID is not set: only a job can requeue itself\n"
    )
    shutil.rmtree(guest.top / "class")
    assert "no port" in guest.run("requeue", "9")[1]
    (guest.top / "requeue").unlink()
    code, error = guest.run("requeue", "9")
    assert code == 1 and "[plugin.slurm] requeue = true" in error


def test_other_forms_of_requeue_are_not_supported(guest):
    for words in (["requeue"], ["requeue", "9", "8"], ["requeuehold", "9"]):
        code, error = guest.run(*words)
        assert code == 1 and "does not work inside a virtual machine" in error


def test_root_in_the_guest_gives_the_port_to_the_job(guest):
    """A guest without the port starts nevertheless."""
    uid = os.getuid() or 1234
    argv = [*guest.shell, guest.top / "requeue", "--own-port", f"{uid}:{os.getgid()}"]
    places = {"VTORQUE_SYS": str(guest.top), "VTORQUE_DEV": str(guest.top)}
    subprocess.run(argv, env={"PATH": "/usr/bin:/bin"} | places, check=True)
    assert os.fstat(guest.guest).st_uid == uid
    shutil.rmtree(guest.top / "class")
    subprocess.run(argv, env={"PATH": "/usr/bin:/bin"} | places, check=True)


@pytest.mark.parametrize(
    ("rank", "supports", "settings", "kinds", "channels"),
    [
        (0, {"RootCommand"}, {"requeue": True}, ["GuestFile", "RootCommand"], 1),
        (1, {"RootCommand"}, {"requeue": True}, [], 1),
        (0, {"EnvVar"}, {"requeue": True}, [], 0),
        (0, {"RootCommand"}, {}, [], 0),
    ],
)
def test_only_the_first_guest_can_use_the_port(rank, supports, settings, kinds, channels):
    plan = replace(guest_plan(rank=rank), supports=frozenset(supports))
    site = PluginSite(settings=(Settings(**settings),))
    items = list(requeue_port.vtorque_guest_context(plan, site))
    assert [type(item).__name__ for item in items] == kinds
    found = list(requeue_port.vtorque_render_domain(plan, site))
    assert [(each.port, each.owner) for each in found] == [(requeue_port.PORT, "job")] * channels


@pytest.fixture
def port():
    """Return a function that starts the helper's loop and returns the guest's end of the port."""
    ends = socket.socketpair()
    threads = []

    def start(requeue, monkeypatch):
        monkeypatch.setattr(requeue_helper, "_PAUSE", 0.0)
        threads.append(threading.Thread(target=requeue_helper.serve, args=(ends[1], requeue)))
        threads[0].start()
        return ends[0]

    yield start
    ends[0].close()
    threads[0].join()
    ends[1].close()


def test_helper_requeues_for_each_valid_request_only(port, monkeypatch):
    reasons = iter(["", "because"])
    guest = port(lambda: next(reasons), monkeypatch)
    junk = (b"", b"x" * 100, b"requeue", b"requeue 5 9", b"requeue -5", b"Requeue 5", b"\xff\0",
            b"requeue 7;id", b"requeue \xd9\xa5", b"requeue " + b"1" * 30)  # fmt: skip
    guest.sendall(b"".join(line + b"\n" for line in junk) + b"requeue 17\nrequeue 18\n")
    with guest.makefile("rb") as said:
        assert [said.readline(), said.readline()] == [b"17 0\n", b"18 1 because\n"]
    assert next(reasons, None) is None


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    monkeypatch.setattr(batch_commands, "_PAUSE", 0.0)
    return SlurmDoubles(tmp_path)


def test_helper_requeues_its_own_job(slurm):
    assert requeue_helper.requeue_job("7", str(slurm.bin), "/none", 20.0) == ""
    assert slurm.calls()[-1] == ["requeue", "7"]
    assert "no longer runs" in requeue_helper.requeue_job("7", str(slurm.bin), "/none", 20.0)


def test_refusal_of_slurm_names_the_option(slurm):
    slurm.facts(refuse=True)
    said = requeue_helper.requeue_job("7", str(slurm.bin), "/none", 20.0)
    assert said.endswith("--requeue: JobRequeue=0 in slurm.conf or --no-requeue")
    slurm.down(True)
    assert "Unable to contact" in requeue_helper.requeue_job("7", str(slurm.bin), "/none", 20.0)


def test_array_element_is_requeued_without_its_array(slurm, tmp_path):
    """The job id of one element is also the id of the array."""
    record = (tmp_path / "bin/scontrol").read_text()
    element = record.replace("JobId={id} JobName", "JobId={id} ArrayJobId=7 ArrayTaskId=2 JobName")
    (tmp_path / "bin/scontrol").write_text(element)
    assert requeue_helper.requeue_job("7", str(slurm.bin), "/none", 20.0) == ""
    assert slurm.calls()[-1] == ["requeue", "7_2"]


@pytest.mark.parametrize("batch", ["slurm", "local"])
@pytest.mark.parametrize("requeue", [True, False])
def test_helper_runs_beside_scripts_of_slurm(tmp_path, slurm, batch, requeue):
    """It waits for the port, and requeues for a request of the guest."""
    settings = Settings(requeue=requeue, bindir=str(slurm.bin), conf="/none")
    site = PluginSite(Paths(run=tmp_path / "run"), (settings,))
    (system,) = plugin.vtorque_batch_systems()
    job = JobAttempt("7", 1, "ada", 1000, "n1")
    found = list(plugin.vtorque_beside_script(job, replace(system, name=batch), site))
    assert len(found) == (requeue and batch == "slurm")
    for argv in found:
        assert argv[0] == sys.executable
        helper = subprocess.Popen(argv, env={"PATH": "/usr/bin:/bin"}, cwd="/")
        with socket.socket(socket.AF_UNIX) as listening:
            place = tmp_path / "run/jobs/7.1/g0"
            place.mkdir(parents=True)
            listening.bind(str(place / "requeue.sock"))
            listening.listen()
            port, _ = listening.accept()
            with port, port.makefile() as said:
                port.sendall(b"requeue 3\n")
                assert said.readline() == "3 0\n"
        assert ["requeue", "7"] in slurm.calls()
        helper.terminate()
        assert helper.wait(60) == -signal.SIGTERM
