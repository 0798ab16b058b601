"""What ``vsub`` does before the batch system is asked, and what it imports for it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vtorque_core import images
from vtorque_core.api_image import BuiltImage

HEAVY = (
    "libvirt", "jinja2", "rich", "cryptography", "pycdlib", "click", "vtorque_core.api_domain",
    "vtorque_core.api_context", "vtorque_core.api_node", "vtorque_core.hypervisor",
    "vtorque_core.domain", "vtorque_core.plan", "vtorque_core.journal", "vtorque_linux_guest.node",
)  # fmt: skip

RUN = """
import json, sys
from vtorque_core.cli import vsub
sys.argv = ["vsub", *json.loads(sys.argv[1])]
try:
    vsub.main()
except SystemExit as end:
    code = end.code
print(json.dumps({"code": code, "modules": sorted(sys.modules)}))
"""


@pytest.fixture
def vsub(tmp_path):
    """Return a function that runs vsub with a site config of its own: no service, no images."""
    config = tmp_path / "vtorque.toml"
    config.write_text(
        f'[paths]\nstate = "{tmp_path}/state"\nrun = "{tmp_path}/run"\n'
        f'[images]\npool = "{tmp_path}/pool"\n[options.ram]\nmax = "2G"\n'
    )
    (tmp_path / "job.sh").write_text("#!/bin/sh\ntrue\n")

    def call(*argv):
        env = {**os.environ, "VTORQUE_CONFIG": str(config), "PYTHONWARNINGS": "ignore"}
        done = subprocess.run(
            [sys.executable, "-c", RUN, json.dumps(argv)],
            cwd=tmp_path, env=env, capture_output=True, text=True, check=True,
        )  # fmt: skip
        last = json.loads(done.stdout.splitlines()[-1])
        return last["code"], done.stderr, last["modules"], done.stdout

    return call


def test_a_submission_imports_nothing_heavy(vsub):
    """It gets as far as the batch system's socket, which does not exist here."""
    code, err, modules, _ = vsub("-vm", "vcpus=1", "job.sh")
    assert code != 0
    assert "local.sock" in err
    assert not [m for m in modules if m.startswith(HEAVY)]


def test_a_submission_that_looks_into_the_image_pool_imports_nothing_heavy(vsub, tmp_path):
    pool = tmp_path / "pool"
    pool.mkdir(mode=0o755)
    with images.staging(pool) as staging:
        for name in ("vmlinux", "initrd"):
            (staging / name).write_bytes(b"x")
        built = BuiltImage("linux", "micro", "x86_64", 64, kernel="vmlinux", initrd="initrd")
        images.commit(pool, "small", staging, built, "test")
    code, err, modules, _ = vsub("-vm", "img=small", "job.sh")
    assert code != 0 and "local.sock" in err
    assert not [m for m in modules if m.startswith(HEAVY)]
    code, err, _, _ = vsub("-vm", "img=smal", "job.sh")
    assert code == 2 and "small" in err, "it has not looked into the pool"


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (("-vm", "ramm=1G"), "ram"),
        (("-vm", "ram=1G,ram=2G"), "twice"),
        (("-vm", "ram=4G"), "[options.ram] max in"),
        (("-vm", "keep=1"), "true or false"),
        (("-vm", "img=../../etc/passwd"), "img"),
        (("-vm", "img=a\nb"), "img"),
        (("-vm", "vcpus=1;rm -rf /"), "vcpus"),
        (("-vm", "vm_prologue=/no/such/file"), "/no/such/file"),
        (("-vm", "disk=relative.raw"), "disk"),
        (("-vm",), "-vm"),
        (("-vm", "none,ram=1G"), "none"),
        (("-vm", ""), "-vm"),
        (("-Z", "job.sh"), "-Z"),
        (("/no/such/script",), "/no/such/script"),
        (("/etc",), "/etc"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(vsub, argv, says):
    full = argv if argv[-1].startswith("/") or argv == ("-vm",) else (*argv, "job.sh")
    code, err, _, _ = vsub(*full)
    assert code == 2
    assert says in err
    assert len(err.strip().splitlines()) == 1
    assert "Traceback" not in err


def test_help_names_every_key_with_the_sites_limits(vsub):
    code, _, _, out = vsub("-h")
    assert code == 0
    assert "ram=SIZE" in out
    assert "max 2G" in out
    for key in ("img", "vcpus", "vms_per_node", "disk", "vm_prologue", "vm_epilogue", "keep"):
        assert f"  {key}=" in out


def test_dry_run_submits_nothing_and_says_bare_metal(vsub):
    code, _, _, out = vsub("--dry-run", "-vm", "none", "job.sh")
    assert (code, "bare metal" in out) == (0, True)


def test_the_wheel_of_the_core_declares_the_three_commands():
    text = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
    for command in ("vsub", "vmgr", "vtorque"):
        assert f"{command} = " in text
