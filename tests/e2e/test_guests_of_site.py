"""Customization of guests by the site: scripts in every guest, precancel scripts, templates."""

import re
import shutil
from importlib.resources import files

import pytest

pytestmark = pytest.mark.e2e

STUBBORN = "#!/bin/sh\ntrap '' TERM\necho started\nwhile :; do sleep 1; done\n"


@pytest.fixture
def scripts(clean, config):
    """A function that makes root's scripts of a kind; they are removed after the test."""
    made = []

    def make(kind, **texts):
        place = clean.config.parent / f"guest-{kind}"
        made.append(place)
        place.mkdir(mode=0o755)
        for name, text in texts.items():
            (place / name).write_text(text)
        config("plugin.linux-guest", f'{kind} = "{place}"')

    yield make
    for place in made:
        shutil.rmtree(place)


def started(node):
    path = node.home / "out"
    return path.exists() and b"started\n" in path.read_bytes()


def cancelled(node, text, *args):
    """Cancel a job while its script runs; return its id."""
    for name in ("out", "err"):
        (node.home / name).unlink(missing_ok=True)
    job = node.submit(text, *args)
    node.wait_for(lambda: started(node), what="the script")
    node.as_user("vmgr", "cancel", job)
    node.wait_for(lambda: node.state_of(job) is None, what="the job's end")
    return job


@pytest.mark.parametrize("how", ["ends", pytest.param("killed", marks=pytest.mark.full)])
def test_epilogue_of_the_site_runs_in_every_guest(clean, scripts, how):
    """Each knows its rank. They also run for a killed job, and a failure is reported."""
    text = '#!/bin/sh\necho "$(id -u) epilogue of $VTORQUE_USER, rank $VTORQUE_RANK"\n'
    scripts("epilogue", first=text, second='#!/bin/sh\nexit "$VTORQUE_RANK"\n')
    size = ("-vm", "vms_per_node=2,ram=128M,vcpus=1")
    if how == "ends":
        result = clean.job("#!/bin/sh\necho done\n", *size)
        assert (result.code, result.err.decode()) == (0, "")
        assert result.out.decode().splitlines() == ["done", f"0 epilogue of {clean.user}, rank 0"]
        job = result.done.stdout.decode().strip()
    else:
        job = cancelled(clean, STUBBORN, *size)
    log = clean.as_user("vmgr", "logs", job).stdout.decode()
    one = f"exit code 1: 0 epilogue of {clean.user}, rank 1"
    assert len(re.findall(rf"site epilogue of \S+ \(rank 1\): {one}", log)) == 1, log
    zero = f"done: 0 epilogue of {clean.user}, rank 0" if how == "killed" else "done"
    assert len(re.findall(rf"site epilogue of \S+ \(rank 0\): {zero}\n", log)) == 1, log


@pytest.mark.full
def test_precancel_scripts_run_before_the_script_is_terminated(clean, scripts):
    """The user's script, then the site's, both as the user; then the script gets SIGTERM."""
    runs = f"kill -0 $(cat {clean.home}/pid) && echo runs"
    scripts("precancel", site=f"#!/bin/sh\necho site $(id -un) $X; {runs}\n")
    clean.script("echo user $(id -un) $X $(pwd)\nexit 3\n", "pre.sh")
    text = (
        "#!/bin/sh\ntrap 'echo TERM; exit 0' TERM\necho $$ >pid; echo started\n"
        "while :; do sleep 0.1; done\n"
    )
    cancelled(clean, text, "-v", "X=a", "-vm", "vm_precancel=pre.sh")
    out = (clean.home / "out").read_text().splitlines()
    user = clean.user
    assert out == ["started", f"user {user} a {clean.home}", f"site {user} a", "runs", "TERM"]
    assert b"script for a canceled job" not in (clean.home / "err").read_bytes()


def test_templates_of_the_site_make_the_domain(clean):
    """libvirt gets the XML of ``vsub --dry-run``; XML outside libvirt's schema starts no guest."""
    templates = clean.config.parent / "templates"
    own = templates / "interface.xml.j2"
    text = files("vtorque_core.plan.domain").joinpath("templates/interface.xml.j2").read_text()
    link = '<link state="up"/>'
    templates.mkdir(mode=0o755)
    try:
        own.write_text(text.replace("<model", f"{link}\n  <model"))
        shown = clean.as_user("vsub", "--dry-run", clean.script("#!/bin/sh\n")).stdout.decode()
        assert f"{own} replaces vtorque_core.plan.domain:templates/interface.xml.j2" in shown
        assert link in shown
        result = clean.job("#!/bin/sh\necho ran\n")
        assert (result.out, result.err) == (b"ran\n", b"")
        own.write_text(text.replace("<model", "<lnk/>\n  <model"))
        result = clean.job("#!/bin/sh\necho ran\n")
        assert (result.code, result.out) == (122, b"")
        assert b"XML document failed to validate against schema" in result.err
    finally:
        shutil.rmtree(templates)


@pytest.mark.full
def test_guest_without_cloud_init_refuses_cloud_config(clean, scripts):
    """A user's file is read at submission; the refusal for a site's file explains the fix."""
    clean.script("#cloud-config\nusers: []\n", "mine.yaml")
    done = clean.as_user("vsub", "-vm", "cloud_config=mine.yaml", clean.script(""), check=False)
    assert done.returncode == 2
    assert b"your cloud-config: users: only packages, write_files, runcmd" in done.stderr
    clean.script("#cloud-config\nruncmd: [id]\n", "mine.yaml")
    result = clean.job("#!/bin/sh\necho ran\n", "-vm", "cloud_config=mine.yaml")
    assert (result.code, result.out) == (121, b"")
    assert b"choose an image of a Debian or RedHat family" in result.err
    scripts("cloud_config", site="#cloud-config\npackages: [gdb]\n")
    result = clean.job("#!/bin/sh\necho ran\n")
    assert (result.code, result.out) == (121, b"")
    assert b"vmgr images label micro cloud-config=none" in result.err
    clean.root("vmgr", "images", "label", "micro", "cloud-config=none")
    try:
        assert clean.job("#!/bin/sh\necho ran\n").out == b"ran\n"
    finally:
        clean.root("vmgr", "images", "label", "micro", "cloud-config-")
