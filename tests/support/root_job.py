"""A job that needs root and its own kernel: packages, modules and docker compose in one boot.

It is examples/compose on a disk of the user, with more commands after it. The disk and the
containers take minutes to build, so .venv keeps them for a day, as it keeps micro.
"""

import hashlib
import json
import re
import shutil
from datetime import UTC, datetime
from pathlib import Path

from hello_package import hello_package
from users import run

REPO = Path(__file__).resolve().parents[2]
EXAMPLE = REPO / "examples/compose"
RECIPE = REPO / "doc/recipes/docker.toml"
KEPT = REPO / ".venv/root-job"
CONTAINERS = ("postgres.tar", "client.tar")
LONG = 3000  # seconds: emulated guests boot from their disk, and unpack archives, in minutes
# In a directory with "debs" of hello_package.
AS_ROOT = """
PATH=$PATH:/usr/sbin:/sbin:/usr/lib/vtorque/bin
id -u
rm -rf /etc/apt/sources.list /etc/apt/sources.list.d
cp -r debs /srv
echo 'deb [trusted=yes] file:/srv/debs ./' >/etc/apt/sources.list
apt-get update -qq && apt-get install -y -qq vtorque-hello >/dev/null
cat /etc/made-by-package
dpkg-query -W -f '${Status}\\n' vtorque-hello
modprobe dummy && grep -c ^dummy /proc/modules
"""
SAID = ["0", "hello", "install ok installed", "1"]
IN_FILE = f"exec >said\n{AS_ROOT}uname -r\nexit 7\n"


def prepare(place, scratch, vmgr, owner):
    """Fill the directory ``place`` of a user for ``job.sh``.

    ``vmgr`` is a command with the config of the site; ``owner`` is ``UID:GID`` or a name.
    """
    shutil.copytree(EXAMPLE, place)
    with (place / "job.sh").open("a") as script:
        script.write(IN_FILE)
    shutil.copytree(hello_package(scratch), place / "debs")
    for file in _built(vmgr, scratch).iterdir():
        run("cp", "--sparse=always", file, place)
    run("chown", "-R", owner if ":" in owner else f"{owner}:", place)


def check(place, output, code):
    """Check what the job has printed and left in ``place``."""
    assert code == 7, output
    assert "pi is about 3.136, from 20000 points" in output
    *said, kernel = (place / "said").read_text().splitlines()
    assert said == SAID, output
    assert re.fullmatch(r"\S+\+deb13\S*-amd64", kernel), kernel
    result = place / "result.json"
    assert json.loads(result.read_text()) == {"points": 20000, "pi": 3.1358}
    assert result.stat().st_uid == place.stat().st_uid


def _built(vmgr, scratch):
    """Return a directory with docker.qcow2 and the containers."""
    kept = KEPT if KEPT.parent.is_dir() and KEPT.parent.stat().st_uid == 0 else scratch / "built"
    mark = kept.with_suffix(".of")
    sources = [RECIPE, EXAMPLE / "pack", EXAMPLE / "start-postgres"]
    sources += sorted((REPO / "plugins/linux-guest/vtorque_linux_guest").rglob("*.py"))
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()
    wanted = f"{digest} {datetime.now(UTC).date()}"
    if not mark.exists() or mark.read_text() != wanted:
        mark.unlink(missing_ok=True)
        shutil.rmtree(kept, ignore_errors=True)
        kept.mkdir()
        _build(vmgr, scratch, kept)
        mark.write_text(wanted)
    return kept


def _build(vmgr, scratch, into):
    """Build the disk as root of a site does, and the containers as the example says."""
    config = scratch / "build.toml"
    (scratch / "images").mkdir()
    config.write_text(f'[images]\npool = "{scratch}/images"\n')
    images = (vmgr, "--config", config, "images")
    run(*images, "build", "docker", "linux", "-o", f"recipe={RECIPE}", timeout=LONG)
    image = json.loads(run(*images, "show", "docker").stdout)
    assert (image["kernel"], image["initrd"]) == (None, None)
    disk = scratch / "images/docker" / image["version"] / image["disk"]
    run("cp", "--sparse=always", disk, into / "docker.qcow2")
    packing = scratch / "packing"
    shutil.copytree(EXAMPLE, packing)
    run("./pack", cwd=packing, timeout=LONG)
    for name in CONTAINERS:
        shutil.move(packing / name, into / name)
