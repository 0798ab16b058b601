"""Users' own images on a site with an administrator (plugins/own-images/README.md)."""

import pytest

from busybox_layout import busybox_layout
from users import run

pytestmark = pytest.mark.e2e

REPORT = """#!/bin/sh
echo "$(id -u) in $PWD, $GREETING, $(cat /etc/os-release)"
touch made
exit 7
"""


@pytest.fixture(scope="module")
def base_image(node):
    """Build the site's base image for own images."""
    node.root("vmgr", "images", "build", "own", "own", timeout=600)


@pytest.fixture
def layout(guest, base_image):
    """Return an OCI layout in a directory of the user, from which the user submits."""
    work = guest.home / "work"
    work.mkdir()
    run("chown", f"{guest.user}:", work)
    yield busybox_layout(work / "app", guest.user)


@pytest.fixture
def allowed(config):
    """Let the site accept own images, with the risk that this kernel has no AppArmor."""
    config("plugin.own-images", "allow = true\nopt_in_unconfined_qemu = true")
    return config


def own_job(node, text, image, *options, argv=()):
    """Run a job in an own image with the directory "work"; return the result."""
    vm = ",".join((f"img={image}", "work=work", *options))
    return node.job(text, *argv, "-vm", vm)


def test_own_image_is_refused_by_default(guest, layout):
    done = own_job(guest, REPORT, f"oci:{layout}")
    assert done.code == 2
    assert b"which this site does not accept (set by [plugin.own-images] allow)" in done.done.stderr


def test_job_of_ordinary_user_runs_in_own_image(guest, layout, allowed):
    done = own_job(guest, REPORT, f"oci:{layout}")
    uid = layout.stat().st_uid
    assert (done.code, done.out) == (
        7, f"{uid} in {guest.home}, hello, ID=mine\n".encode()
    ), (done.done.stderr, done.err)  # fmt: skip
