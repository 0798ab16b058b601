"""Root in a guest of an own image installs packages, loads modules, runs docker compose."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from hello_package import hello_package
from oci_images import as_directory, layout_files
from users import run
from vtorque_linux_guest.image.distribution import apt_sources

pytestmark = [pytest.mark.e2e, pytest.mark.full]

REPO = Path(__file__).resolve().parents[2]
LONG = 3000  # seconds: emulated guests boot from their disk, and unpack archives, in minutes
AS_ROOT = """#!/bin/sh
cd work
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


@pytest.fixture
def site(guest, config):
    """Let the site accept own images, although this kernel has no AppArmor; return the node."""
    config("plugin.own-images", "allow = true\nallow_root = true\nopt_in_unconfined_qemu = true")
    config("node", f"start_timeout = {LONG}")
    return guest


@pytest.fixture
def work(site, scratch):
    """Return a directory of the user, with a package for apt."""
    path = site.home / "work"
    shutil.copytree(hello_package(scratch), path / "debs")
    run("chown", "-R", f"{site.user}:", path)
    return path


@pytest.fixture(scope="module")
def docker_disk(node):
    """Return the disk of the image docker, which root builds from its recipe."""
    node.root("vmgr", "images", "build", "docker", "linux", "-o",
              f"recipe={REPO}/doc/recipes/docker.toml", timeout=LONG)  # fmt: skip
    image = json.loads(node.root("vmgr", "images", "show", "docker").stdout)
    assert (image["kernel"], image["initrd"]) == (None, None)
    yield node.state / "images/docker" / image["version"] / image["disk"]
    node.root("vmgr", "images", "remove", "docker")


def copy(disk, place, node):
    """Copy the disk as the user would."""
    run("install", "-o", node.user, "-m", "644", disk, place / "docker.qcow2")


def test_root_installs_packages_and_loads_modules_in_a_container(site, work):
    """The site chooses the modules: here those of the base image and dummy."""
    build = ("vmgr", "images", "build", "own", "own", "-o", "modules=dummy")
    site.root(*build, timeout=LONG)
    suite = ("--variant=apt", "bookworm", "-", *apt_sources("bookworm"))
    packed = subprocess.run(
        ["mmdebstrap", "--quiet", "--mode=root", *suite],
        check=True, capture_output=True, timeout=LONG,
    )  # fmt: skip
    layout = as_directory(layout_files([packed.stdout]), site.home / "debian")
    run("chown", "-R", f"{site.user}:", layout)
    options = f"img=oci:{layout},root=script,work=work,ram=512M"
    done = site.job(AS_ROOT, "-vm", options, timeout=LONG)
    assert done.out.decode().splitlines() == SAID, (done.done.stderr, done.err)
    shutil.rmtree(site.home / ".cache/vtorque")


def test_root_installs_packages_and_loads_modules_on_a_disk(site, work, docker_disk):
    copy(docker_disk, work, site)
    options = "img=work/docker.qcow2,root=script,work=work,ram=768M"
    done = site.job(AS_ROOT, "-vm", options, timeout=LONG)
    assert done.out.decode().splitlines() == SAID, (done.done.stderr, done.err)


def test_compose_example_writes_its_result_into_the_home(site, docker_disk):
    place = site.home / "compose"
    shutil.copytree(REPO / "examples/compose", place)
    run("./pack", cwd=place, timeout=LONG)
    copy(docker_disk, place, site)
    run("chown", "-R", f"{site.user}:", place)
    command = ("vsub", "-W", "block=true", "job.sh")
    done = site.as_user(*command, cwd=place, check=False, timeout=LONG)
    (output,) = place.glob("compose.o*")
    said = output.read_text()
    assert done.returncode == 0, (said, done.stderr)
    assert "pi is about 3.136, from 20000 points" in said
    result = place / "result.json"
    assert json.loads(result.read_text()) == {"points": 20000, "pi": 3.1358}
    assert result.stat().st_uid == place.stat().st_uid
