"""``vsub -I --x11`` on a real Slurm: the display that Slurm forwards, in a Debian guest."""

import subprocess

import pytest

import slurm_cluster as slurm
import x_display
from terminal import PROMPT, CommandTerminal
from x_display import CLIENT

pytestmark = [pytest.mark.e2e, pytest.mark.full]

CONF = "/etc/slurm/slurm.conf"
# Slurm's X11 does not support proctrack/linuxproc, slurm.conf(5). With proctrack/pgid Slurm does
# not end ssh, which runs in a separate session.
FORWARD = "s/^PrologFlags=.*/PrologFlags=X11/; s/linuxproc/pgid/"


@pytest.fixture(scope="module")
def forwarding_cluster(cluster):
    """Return the cluster with Slurm's X11 forwarding, and a Debian image."""
    x_display.install()
    image = cluster.image("debian")
    for machine in slurm.MACHINES:
        cluster.root(machine, "cp", CONF, f"{CONF}.before")
        cluster.root(machine, "sed", "-i", FORWARD, CONF)
    cluster.restart_slurm()
    yield image
    for machine in slurm.MACHINES:
        cluster.root(machine, "mv", f"{CONF}.before", CONF)
    cluster.restart_slurm()


@pytest.fixture
def shell(forwarding_cluster, clean):
    """Return a function that starts a shell in a guest on n1, from a login host with a display."""
    cookie = x_display.put(clean.home / "x", slurm.UID)
    server = subprocess.Popen(
        clean.user_command("Xvfb", "-displayfd", "1", "-auth", "x/cookies", machine="login"),
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    display = f":{int(server.stdout.readline())}"
    add = ("xauth", "-q", "add", display, "MIT-MAGIC-COOKIE-1", cookie)
    clean.user(*add, machine="login")

    def start(*args):
        argv = ("vsub", "-I", *args, "-wn1", "-vm", f"img={forwarding_cluster},ram=768M,vcpus=1")
        env = {"TERM": "xterm", "DISPLAY": display}
        terminal = CommandTerminal(clean.user_command(*argv, machine="login", env=env))
        job_id = terminal.read(rb"Granted job allocation (\d+)")[1].decode()
        terminal.read(PROMPT)
        return terminal, job_id

    yield start
    server.terminate()
    server.stdout.close()
    server.wait()
    clean.user("rm", "-r", ".Xauthority", "x")


def ssh_of(cluster):
    return cluster.processes("n1", r"^ssh .* -R localhost:")


def test_client_in_the_guest_reaches_the_display(shell, clean):
    """On a submit host, with its cookie only. ssh ends with the job."""
    terminal, _ = shell("--x11")
    terminal.write(b"hostname; echo $DISPLAY; " + CLIENT + b"; echo ended-$?\r")
    terminal.read(rb"\rvn1\r\nlocalhost:\d\d\.0\r\n")
    terminal.read(rb"vendor string: +The X.Org Foundation")
    terminal.read(rb"ended-0\r")
    terminal.read(PROMPT)
    wrong = b"head -c -16 $XAUTHORITY >x/no; head -c 16 /dev/urandom >>x/no; XAUTHORITY=x/no "
    terminal.write(wrong + CLIENT + b"; echo ended-$?\r")
    terminal.read(rb"ended-1\r")
    terminal.read(PROMPT)
    assert len(ssh_of(clean)) == 1
    terminal.write(b"exit 4\r")
    assert terminal.code() == 4
    assert ssh_of(clean) == []


def test_no_display_is_forwarded_without_the_option(shell, clean):
    terminal, _ = shell()
    terminal.write(b"echo none-$DISPLAY$XAUTHORITY-; grep -c ' 0100007F:17' /proc/net/tcp; exit\r")
    terminal.read(rb"none--\r\n0\r")
    assert ssh_of(clean) == []
    assert terminal.code() == 1
