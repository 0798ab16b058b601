"""What ``vtorque plugins new`` writes runs real jobs: a device's cards, a guest type's guests."""

import json
import subprocess
import sys

import pytest

from vtorque_testing.new_plugin import KINDS, write

pytestmark = [pytest.mark.e2e, pytest.mark.full]


@pytest.fixture
def install(node, scratch):
    """Give a function that writes a plugin of this kind and installs it until the test's end."""
    made = []

    def do(kind):
        source = write(f"acme-{kind}", KINDS[kind], scratch)
        wheel = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
        subprocess.run([*wheel, "-w", scratch, source], check=True, timeout=300)
        (built,) = scratch.glob(f"vtorque_acme_{kind}-*.whl")
        made.append(f"vtorque-acme-{kind}")
        node.root("pip", "install", "-q", "--no-index", "--no-deps", str(built))
        return f"acme-{kind}"

    yield do
    for each in made:
        node.root("pip", "uninstall", "-q", "-y", each)


def test_a_device_is_in_the_guest(guest, install):
    install("device")
    ended = guest.job(
        "#!/bin/sh\necho $VTORQUE_ACME_DEVICE\n"
        'for disk in /sys/block/vd*; do cat $disk/serial; echo; done | grep card\nexit 3\n',
        *("-vm", "acme_device=2"),
    )  # fmt: skip
    assert (ended.code, ended.err) == (3, b""), ended
    assert ended.out.splitlines() == [b"card0 card1", b"card0", b"card1"]


def test_a_job_runs_in_another_kind_of_guest(guest, install):
    """With its user's home, their name, and all that a job script may expect."""
    kind = install("guest")
    micro = json.loads(guest.root("vmgr", "images", "show", "micro").stdout)
    files = guest.state / "images/micro" / micro["version"]
    sources = [f"{each}={files / micro[each]}" for each in ("kernel", "initrd")]
    options = [word for each in sources for word in ("-o", each)]
    guest.root("vmgr", "images", "build", "other", kind, *options)
    try:
        ended = guest.job(
            "#!/bin/sh\nid -un\nhostname\necho $DISTRO $1 $PBS_JOBNAME\necho here >made\n"
            "echo error >&2\ngrep -c ^vte2 /etc/passwd\nexit 5\n",
            *("-vm", "img=other"), name="named",
        )  # fmt: skip
        assert (ended.code, ended.err) == (5, b"error\n"), (ended, ended.err)
        user, host, told, known = ended.out.decode().splitlines()
        assert (user, told.split(), known) == (guest.user, [kind, "named"], "1")
        assert host
        assert (guest.home / "made").read_text() == "here\n"
    finally:
        guest.root("vmgr", "images", "remove", "other", "--now")
