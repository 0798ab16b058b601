"""Root in a guest of an own disk on a real Slurm: packages, kernel modules, docker compose."""

import pytest

import root_job
import slurm_cluster as slurm

pytestmark = [pytest.mark.e2e, pytest.mark.full]
CONFIG = "/etc/vtorque/vtorque.toml"
PATIENT = f"[node]\nstart_timeout = {root_job.LONG}\n"


@pytest.fixture
def site(own_images, clean):
    """Let guests boot from a disk without KVM; ``own_images`` restores the config."""
    for machine in slurm.MACHINES:
        own_images.root(machine, "tee", "-a", CONFIG, stdin=PATIENT.encode())
    return own_images


def test_root_installs_packages_and_runs_compose_on_a_disk(site, scratch):
    """The same job as on local; Slurm's own exit code is that of the script."""
    place = site.home / "compose"
    root_job.prepare(place, scratch, f"{slurm.PREFIX}/vmgr", f"{slurm.UID}:{slurm.UID}")
    submit = ("sh", "-c", "cd compose && exec vsub -W job.sh")
    done = site.user(*submit, check=False, timeout=root_job.LONG)
    outputs = [path.read_text() for path in place.glob("slurm-*.out")]
    assert len(outputs) == 1, done.stderr
    root_job.check(place, outputs[0], done.returncode)
