"""``vsub`` before it calls the batch system, and the modules that it imports."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import forked
import sparing
from vtorque_core.api.image_builder import BuiltImage
from vtorque_core.api.libvirt_domain import QemuArgs
from vtorque_core.base import kvm
from vtorque_core.base.errors import UsageError
from vtorque_core.base.names import CONFIG_PATH
from vtorque_core.cli import dry_run, entry
from vtorque_core.cli import vsub as vsub_module
from vtorque_core.cli.entry import split_config
from vtorque_core.cli.vsub import main
from vtorque_core.config.plugins import Plugins
from vtorque_core.config.site_config import Site, build
from vtorque_core.config.site_file import Node, Raw
from vtorque_core.images import store
from vtorque_core.plan.domain.merge import Contributed, merge
from vtorque_images import change
from vtorque_testing.planned import guest_plan

HEAVY = (
    "libvirt", "jinja2", "rich", "cryptography", "pycdlib", "click", "ctypes", "pickle",
    "vtorque_core.api.libvirt_domain", "vtorque_core.api.guest_context",
    "vtorque_core.api.guest_plan", "vtorque_core.base.hypervisor", "vtorque_core.plan.domain",
    "vtorque_core.plan.guests", "vtorque_core.records.journal", "vtorque_linux_guest.node",
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
def site(tmp_path):
    """Return the path of a separate site config: no service, no images."""
    config = tmp_path / "vtorque.toml"
    config.write_text(
        f'[paths]\nstate = "{tmp_path}/state"\nrun = "{tmp_path}/run"\n'
        f'[images]\npool = "{tmp_path}/pool"\n[options.ram]\nmax = "2G"\n'
    )
    (tmp_path / "job.sh").write_text("#!/bin/sh\ntrue\n")
    return str(config)


@pytest.fixture
def vsub(tmp_path, site):
    """Return a function that runs vsub there."""

    def call(*argv):
        done = subprocess.run(
            [sys.executable, "-c", RUN, json.dumps(["--config", site, *argv])],
            cwd=tmp_path, env={**os.environ, "PYTHONWARNINGS": "ignore"},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        last = json.loads(done.stdout.splitlines()[-1])
        return last["code"], done.stderr, last["modules"], done.stdout

    return call


@pytest.mark.parametrize(
    ("is_own", "path", "said"),
    [
        (True, None, "vsub: using the site config {config}\n"),
        pytest.param(False, None, "", marks=pytest.mark.root),
        (True, "other.toml", ""),
    ],
)
def test_vsub_of_a_user_installation_names_the_site_config(
    tmp_path, site, monkeypatch, capfd, is_own, path, said
):
    """vsub prints no name if the user gives a config or root has installed vsub."""
    for module in (entry, vsub_module):
        monkeypatch.setattr(module, "CONFIG_PATH", Path(site))
    prefix = tmp_path / "prefix"
    prefix.mkdir()
    monkeypatch.setattr(sys, "prefix", str(prefix))
    if os.geteuid() == 0:
        os.chown(prefix, 65534, 65534)
    user = prefix.stat().st_uid if is_own else 0
    monkeypatch.setattr(os, "geteuid", lambda: user)
    if path:
        (tmp_path / path).write_text(Path(site).read_text())
    words = ["--config", str(tmp_path / path)] if path else []
    assert vsub_module.submit([*words, "--dry-run", "-vm", "none", str(tmp_path / "job.sh")]) == 0
    assert capfd.readouterr().err == said.format(config=site)


@pytest.mark.parametrize(
    ("accel", "failure", "is_node", "wanted"),
    [
        ("auto", "no /dev/kvm", True, "tcg"),
        ("auto", "", True, "kvm"),
        ("auto", "no /dev/kvm", False, "kvm"),
        ("kvm", "no /dev/kvm", False, "kvm"),
        ("tcg", "", True, "tcg"),
    ],
)
def test_dry_run_shows_the_accelerator_of_a_node(
    tmp_path, monkeypatch, accel, failure, is_node, wanted
):
    tables = {"paths": {"run": str(tmp_path / "run")}, "node": {"accel": accel}}
    site = build(Raw(tmp_path / "vtorque.toml", "", tables), Plugins())
    monkeypatch.setattr(dry_run.kvm, "cached_probe", lambda *_: kvm.Probe(failure))
    if is_node:
        (tmp_path / "run").mkdir()
    assert dry_run._accelerator(site).type == wanted


def test_dry_run_shows_the_sites_qemu_user_and_the_qemu_arguments_that_it_allows():
    node = Node(qemu_user="acme-qemu", allow_qemu_args=True)
    merged = merge([Contributed("acme", "acme 1.0", QemuArgs("a", ("-acme-argument",)))])
    xml = dry_run._example(guest_plan(), merged, Site(node=node), kvm.Accel("tcg"))
    assert ":acme-qemu</label>" in xml and "-acme-argument" in xml


def test_submission_imports_no_heavy_module(vsub):
    """The submission reaches the batch system's socket, which does not exist in this test."""
    code, err, modules, _ = vsub("-vm", "vcpus=1", "job.sh")
    assert code != 0
    assert "local.sock" in err
    assert not [m for m in modules if m.startswith(HEAVY)]


def test_submission_imports_base_api_config_and_the_reading_half_of_images(vsub):
    """The submission must not import standard modules that only other commands use, either."""
    _, _, modules, _ = vsub("-vm", "vcpus=1", "job.sh")
    floors = ("base", "api", "config", "images.pool", "images.sidecar", "local")
    floors += ("batch", "cli.vsub", "cli.entry")
    core = {m.removeprefix("vtorque_core.") for m in modules if m.startswith("vtorque_core.")}
    packages = {"cli", "images"}
    assert {
        m for m in core - packages if not f"{m}.".startswith(tuple(f"{f}." for f in floors))
    } == set()
    unused = ("subprocess", "hashlib", "logging", "importlib.metadata")
    assert not [m for m in modules if m.startswith(unused)]


def test_config_option_is_parsed_only_as_the_first_argument():
    """Later it may be the script's own argument."""
    assert split_config(["--config", "x", "-h"]) == (Path("x"), ["-h"])
    assert split_config(["--config=x", "-h"]) == (Path("x"), ["-h"])
    assert split_config(["--config=a=b", "j"]) == (Path("a=b"), ["j"])
    assert split_config(["--configs=x"]) == (CONFIG_PATH, ["--configs=x"])
    for words in (["--config", ""], ["--config="]):
        with pytest.raises(UsageError, match="--config needs a file"):
            split_config(words)
    assert split_config(["job.sh", "--config"]) == (CONFIG_PATH, ["job.sh", "--config"])
    with pytest.raises(UsageError, match="needs a file"):
        split_config(["--config"])


def test_submission_that_reads_the_image_pool_imports_no_heavy_module(vsub, tmp_path):
    pool = tmp_path / "pool"
    pool.mkdir(mode=0o755)
    with store.staging(pool) as staging:
        for name in ("vmlinux", "initrd"):
            (staging / name).write_bytes(b"x")
        built = BuiltImage("linux", "micro", "x86_64", 64, kernel="vmlinux", initrd="initrd")
        change.commit(pool, "small", staging, built, "test")
    code, err, modules, _ = vsub("-vm", "img=small", "job.sh")
    assert code != 0 and "local.sock" in err
    assert not [m for m in modules if m.startswith(HEAVY)]
    code, err, _, _ = vsub("-vm", "img=smal", "job.sh")
    assert code == 2 and "small" in err, "vsub has not read the image pool"


BAD = [
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
]


def test_bad_input_prints_one_line_and_exits_with_2(vsub, site, tmp_path):
    code, err, _, _ = vsub("-vm", "ramm=1G", "job.sh")  # as it is called by users
    assert (code, "ram" in err, len(err.splitlines())) == (2, True, 1)
    faults = []
    for argv, says in BAD:
        full = argv if argv[-1].startswith("/") or argv == ("-vm",) else (*argv, "job.sh")
        done = forked.call(main, ["vsub", "--config", site, *full], {**os.environ}, tmp_path)
        if done.returncode != 2 or says not in done.stderr or len(done.stderr.splitlines()) != 1:
            faults.append(done)
    assert faults == []


def test_key_of_a_disabled_plugin_is_explained(site, tmp_path):
    path = Path(site)
    path.write_text(path.read_text() + "[plugins]\ndisable = ['vrdma', 'unclot']\n")
    words = ["vsub", "--config", site, "-vm", "unclot=true", "job.sh"]
    done = forked.call(main, words, {**os.environ}, tmp_path)
    where = f"(plugins that are disabled on this site by {site}:9: unclot, vrdma)"
    assert f"there is no -vm key with this name {where}" in done.stderr
    path.write_text(path.read_text().replace("disable = ['vrdma', 'unclot']", "enable = ['local']"))
    done = forked.call(main, words, {**os.environ}, tmp_path)
    assert f"disabled on this site by {site}:9: " in done.stderr and "unclot, " in done.stderr


def test_help_names_every_key_with_the_limits_of_the_site(vsub):
    code, _, _, out = vsub("-h")
    assert code == 0
    assert "ram=SIZE" in out
    assert "max 2G" in out
    for key in ("img", "vcpus", "vms_per_node", "disk", "vm_prologue", "vm_epilogue", "keep"):
        assert f"  {key}=" in out


def test_dry_run_prints_bare_metal_and_submits_nothing(vsub):
    code, _, _, out = vsub("--dry-run", "-vm", "none", "job.sh")
    assert (code, "bare metal" in out) == (0, True)


LAUNCHERS = {
    "vsub": "vtorque_core/cli", "vmgr": "vtorque_core/cli", "vtorque": "vtorque_core/cli",
    "vtorque-pool": "plugins/pool/vtorque_pool",
}  # fmt: skip


@pytest.mark.parametrize("name", sparing.each(3, LAUNCHERS))
def test_launchers_in_wheels_isolate_python(tmp_path, name):
    """vsub once ran a json.py in PYTHONPATH, and PYTHONHOME prevented Python's start."""
    top = Path(__file__).resolve().parents[3]
    launcher = top / LAUNCHERS[name] / "launchers" / name
    project = launcher.parents[2] if name == "vtorque-pool" else top
    target = f'"{launcher.relative_to(project)}" = "{name}"'
    text = (project / "pyproject.toml").read_text()
    assert target in text and "[project.scripts]" not in text
    (tmp_path / "bin").mkdir()
    installed = tmp_path / "bin" / name
    installed.write_bytes(launcher.read_bytes())
    installed.chmod(0o755)
    (tmp_path / "link").symlink_to(installed)
    # The Python next to it, as in a virtual environment.
    (tmp_path / "bin/python3").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (tmp_path / "bin/python3").chmod(0o755)
    for module in ("json", "signal", "click", "vtorque_core"):
        (tmp_path / f"{module}.py").write_text("print('foreign')\n")
    hostile = {"PYTHONPATH": str(tmp_path), "PYTHONHOME": "/nowhere", "PATH": "/nowhere"}
    (tmp_path / "site.toml").touch()
    words = ["--config", "site.toml", "--help"] if name == "vsub" else ["--help"]
    # Ctrl-C before Python has started must print no traceback and end the command.
    interrupting = f'#!/bin/sh\nkill -INT $$\nexec {sys.executable} "$@"\n'
    for path in (installed, tmp_path / "link"):
        done = subprocess.run(
            [path, *words], env=hostile, cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.lower().startswith(f"usage: {name}")
    if name != "vtorque-pool":  # Slurm calls it
        (tmp_path / "bin/python3").write_text(interrupting)
        done = subprocess.run(
            ["/usr/bin/env", "--default-signal=INT", installed, *words],
            cwd=tmp_path, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (130, f"{name}: interrupted\n")
