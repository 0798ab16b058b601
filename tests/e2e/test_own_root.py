"""Root in a guest of an own image installs packages, loads modules, runs docker compose."""

import shutil
import subprocess

import pytest

import root_job
from hello_package import hello_package
from oci_images import as_directory, layout_files
from root_job import LONG
from users import run
from vtorque_linux_guest.image.distribution import apt_sources

pytestmark = [pytest.mark.e2e, pytest.mark.full]

IN_CONTAINER = f"#!/bin/sh\ncd work\n{root_job.AS_ROOT}"


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
    done = site.job(IN_CONTAINER, "-vm", options, timeout=LONG)
    assert done.out.decode().splitlines() == root_job.SAID, (done.done.stderr, done.err)
    shutil.rmtree(site.home / ".cache/vtorque")


def test_root_installs_packages_and_runs_compose_on_a_disk(site, scratch):
    """The example of the manual, and more in the same boot."""
    place = site.home / "compose"
    root_job.prepare(place, scratch, site.prefix / "bin/vmgr", site.user)
    command = ("vsub", "-W", "block=true", "job.sh")
    done = site.as_user(*command, cwd=place, check=False, timeout=LONG)
    (output,) = place.glob("compose.o*")
    root_job.check(place, output.read_text(), done.returncode)
