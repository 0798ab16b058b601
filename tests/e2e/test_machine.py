"""A machine of namespaces (scripts/machine) has no site and no batch system of its host."""

import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

REPO = Path(__file__).resolve().parents[2]
PLACES = (
    "/etc/vtorque-seen", "/opt/vtorque-seen", "/var/lib/vtorque-seen", "/var/spool/torque-seen",
)  # fmt: skip
COMMAND = Path("/usr/local/bin/vsub-seen")


@pytest.fixture
def site():
    """Make files like a configured node's, under names that no node uses; return their paths."""
    files = [Path(place, "below/file") for place in PLACES]
    for path in files:
        path.parent.mkdir(parents=True)
        path.touch()
    COMMAND.touch()
    yield [*files, COMMAND]
    for place in PLACES:
        shutil.rmtree(place)
    COMMAND.unlink()


def test_machine_has_no_site_of_the_host(site):
    paths = " ".join(map(str, site))
    show = (
        f"ls -d {paths} /etc/vtorque /var/lib/vtorque 2>/dev/null; "
        "stat -c %a /etc /var/lib /usr/local/bin"
    )
    done = subprocess.run(
        [REPO / "scripts/machine", "bash", "-c", show],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    modes = [
        oct(Path(path).stat().st_mode & 0o7777)[2:]
        for path in ("/etc", "/var/lib", "/usr/local/bin")
    ]
    assert done.stdout.split() == modes, done
    assert all(path.exists() for path in site)
