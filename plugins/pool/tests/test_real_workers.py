"""Guests of libvirt that are nodes of a real Slurm: the recipe's image, munge, slurmd, all real."""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from guest_world import GuestWorld

pytestmark = [pytest.mark.e2e, pytest.mark.full]
RECIPE = Path(__file__).parents[3] / "doc/recipes/slurm-worker.toml"
LOOK = "grep -rlsF -D skip {} /etc /home /root /run /tmp /var; cat /dev/vdb > /dev/null"


@pytest.fixture(scope="module")
def top():
    with tempfile.TemporaryDirectory(prefix="vtorque-workers-", dir="/var/tmp") as name:
        yield Path(name)


@pytest.fixture(scope="module")
def world(top):
    (top / "images").mkdir()
    config = top / "images.toml"
    config.write_text(f'[paths]\nstate = "{top}/v"\n[images]\npool = "{top}/images"\n')
    vmgr = (sys.executable, "-m", "vtorque_core.cli.vmgr", "--config", str(config))
    build = ("images", "build", "slurm-worker", "linux", "-o", f"recipe={RECIPE}")
    subprocess.run([*vmgr, *build], check=True, timeout=1800)
    with GuestWorld(top) as found:
        yield found


def test_ten_jobs_start_guests_up_to_the_limit_and_all_end(world):
    script = "test $(hostname) = $SLURMD_NODENAME && sleep 5"
    jobs = [world.submit(script, "-o", "/dev/null") for _ in range(10)]
    most = set()

    def all_ended():
        most.update(world.machines())
        return not world.jobs()

    world.wait(all_ended, "the jobs' end", 1200)
    assert len(most) == 3
    owners = {path.stat().st_uid for path in (world.top / "images").rglob("*")}
    assert owners == {0}, "libvirt changed the owner of the pool's files"
    shown = [world.run("scontrol", "-o", "show", "job", job) for job in jobs]
    assert all(" JobState=COMPLETED " in text for text in shown), shown
    assert {re.search(r" BatchHost=(\S+)", text)[1] for text in shown} == set(world.names)
    world.wait(lambda: not world.machines(), "no machines", 600)
    world.wait(lambda: "no machines" in world.pool(), "vtorque pool without machines", 300)
    assert world.run("ls", "/run/machines") == ""


def test_secrets_of_a_worker_are_readable_by_root_only(world):
    look = LOOK.format((world.top / "munge.key").read_text()[:64])
    of_root = world.run("srun", "bash", "-c", look).split()
    assert "/etc/munge/munge.key" in of_root
    nobody = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--")
    said = world.run(*nobody, "srun", "bash", "-c", f"id -u; {look} && echo read", check=False)
    assert said == "65534\n"
