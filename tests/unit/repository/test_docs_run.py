"""Blocks of the documentation run, and print and make what their page says.

``RUN`` has the blocks of other tests; ``NOT_RUN`` has the reason for each block that no test runs.
"""

import importlib.metadata
import itertools
import json
import mmap
import os
import pwd
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner
from vtorque_osv import recipe as osv_recipe

from doc_blocks import REPO, block, every, is_site_config
from vtorque_admin.config_command import config as config_command
from vtorque_core.api import Refused, job_log
from vtorque_core.api.directives import vm_directives
from vtorque_experiment import check, definition, matrix
from vtorque_joblog.api import GROUP as JOBLOG
from vtorque_jobs import explain
from vtorque_linux_guest.image import recipe
from vtorque_pool.opening import GROUP as POOL
from vtorque_telemetry import app
from vtorque_telemetry.api import GROUP as TELEMETRY
from vtorque_testing import vmgr
from vtorque_testing.planned import PlannedNode, load_with_core

HERE = "tests/unit/repository/test_docs_run.py"
LIMITS = "[options.vcpus]\nmax = 4\n"


def bash(text, cwd, **environ):
    """Run a script like a job; return exit code and output."""
    path = f"{cwd}:/usr/bin:/bin"
    done = subprocess.run(
        ["/bin/bash", "-c", text], cwd=cwd, env={"PATH": path, "HOME": str(cwd), **environ},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=60,
    )  # fmt: skip
    return done.returncode, done.stdout


# -- job scripts -------------------------------------------------------------------------------


def test_first_jobs_of_the_manual_print_the_expected_output(tmp_path):
    host, name = os.uname().nodename, pwd.getpwuid(os.geteuid()).pw_name
    code, said = bash(block("doc/ten-minutes-user.md", "echo"), tmp_path)
    assert (code, said) == (3, f"on {host} as {name} in {tmp_path}\n")
    code, said = bash(block("doc/user.md", "#!/bin/bash"), tmp_path)
    assert (code, said) == (3, f"on {host}, kernel {os.uname().release}, as {name} in {tmp_path}\n")


def test_study_estimates_pi(tmp_path):
    code, said = bash(block("doc/tutorial.md", "#!/bin/sh"), tmp_path, N="1000")
    study = tomllib.loads(block("doc/tutorial.md", "title ="))
    assert code == 0
    assert 2.9 < float(re.search(study["take"]["pi"]["pattern"], said)[1]) < 3.4
    python = block("doc/tutorial.md", "#!/usr/bin/python3")
    assert bash(f"python3 - <<'END'\n{python}END", tmp_path)[1].startswith("pi is about 3.1")


def test_scripts_request_valid_options():
    node, seen = PlannedNode.make(load_with_core("none")), 0
    for each in every():
        if each.language == "sh" and (asked := vm_directives(each.text.encode())):
            seen += bool(node.submit(*asked).pairs)
    assert seen == 5


def test_metrics_reported_as_in_the_manual_are_parsed(tmp_path):
    file = tmp_path / "metrics"
    code, said = bash(block("doc/telemetry.md", 'echo "loss'), tmp_path, VTORQUE_METRICS=str(file))
    assert (code, said) == (0, "")
    assert [app.parse(line) for line in file.read_bytes().splitlines()] == [
        ("vtorque_app_loss", (), 0.25),
        ("vtorque_app_epoch_seconds", (("fold", "2"), ("phase", "train")), 3.1),
    ]


@pytest.mark.parametrize("first", ["#!/bin/bash", "#PBS"])
def test_service_in_a_guest_is_reached_by_its_solvers(tmp_path, first):
    """Both ways of batch.md start a service, then solvers on the other nodes that connect to it."""
    records = 'echo "${0##*/} $*" >> "$HOME/calls"'
    programs = dict.fromkeys(("redis-server", "srun", "mpirun"), records)
    programs["hostname"] = '[ "$1" = -i ] && echo 10.1.2.3 || echo here'  # as in the guest
    for name, does in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "nodes").write_text("here\nn1\nn2\n")
    text = block("doc/batch.md", first) + "\nwait\n"
    code, said = bash(text, tmp_path, PBS_NODEFILE=str(tmp_path / "nodes"), PBS_JOBID="7.srv")
    assert code == 0, said
    *_, service, solver = sorted((tmp_path / "calls").read_text().splitlines(), key=len)
    assert service == "redis-server --bind 0.0.0.0 --protected-mode no"
    assert solver.endswith(f"{tmp_path}/bin/solver --store 10.1.2.3")
    if first == "#PBS":
        assert (tmp_path / "solvers.7.srv").read_text() == "n1\nn2\n"


def test_shared_memory_of_guests_runs(tmp_path, monkeypatch):
    memory = tmp_path / "shmem"
    memory.write_bytes(bytes(mmap.PAGESIZE))
    monkeypatch.setenv("VTORQUE_SHMEM", str(memory))
    text = block("plugins/unclot/README.md", "import mmap")
    exec(compile(text, "plugins/unclot/README.md", "exec"), {})  # noqa: S102 - our own manual
    assert memory.read_bytes().rstrip(b"\0") == b"hello"


def test_laptop_page_and_readme_install_the_same_packages():
    assert block("doc/laptop.md", "apt-get") == block("README.md", "apt-get")
    assert (
        block("doc/laptop.md", "scripts/wheels").splitlines()[-1]
        == (block("README.md", "scripts/wheels").splitlines()[-1])
    )


# -- files -------------------------------------------------------------------------------------


def test_recipes_are_valid(tmp_path):
    (tmp_path / "recipe.toml").write_text(block("doc/images.md", 'family = "debian"'))
    found = recipe.read(tmp_path / "recipe.toml")
    assert found.packages == ("gfortran", "libopenmpi-dev")
    (tmp_path / "simulate.toml").write_text(block("doc/osv.md", "loader ="))
    made = osv_recipe.from_arguments({"recipe": str(tmp_path / "simulate.toml")})
    assert made.min_ram == 256


@pytest.mark.parametrize(
    ("page", "group"), [("logging", JOBLOG), ("pool", POOL), ("telemetry", TELEMETRY)]
)
def test_entry_points_are_in_a_known_group(page, group):
    (text,) = [b.text for b in every() if b.page == f"doc/{page}.md" and "entry-points" in b.text]
    ((name, points),) = tomllib.loads(text)["project"]["entry-points"].items()
    assert name == group
    for key, value in points.items():
        assert importlib.metadata.EntryPoint(key, value, name).module.startswith("acme")


def test_log_line_of_the_page_is_printed():
    entry = json.loads(block("doc/logging.md", '{"t"'))
    assert job_log.text(entry).endswith("INFO  ready g0      core: ready after 4.1 s")


def test_experiment_of_the_page_runs(tmp_path, monkeypatch):
    script = block("doc/experiment.md", "#!/bin/bash")
    (tmp_path / "sum.sh").write_text(script)
    (tmp_path / "sum.toml").write_text(block("doc/experiment.md", "title ="))
    code, said = bash(script, tmp_path, COUNT="100")
    took, counted = [each.pattern for each in definition.read(tmp_path / "sum.toml").takes]
    assert code == 0 and re.search(took, said)
    assert re.search(counted, said)[1] == "100"
    shown = block("doc/experiment.md", "$ vmgr experiment run").splitlines()
    command, *printed = itertools.takewhile(lambda line: not line.endswith("run sum.toml"), shown)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "site.toml").write_text('[batch]\nsystem = "local"\n')
    monkeypatch.setattr(check, "find_refused", lambda *asked: {})  # vsub refuses root
    done = vmgr.run(tmp_path / "site.toml", *command.split()[2:])
    assert done.output.splitlines() == printed, done


def test_experiment_with_a_vm_key_in_the_matrix_runs():
    text = 'script = "sum.sh"\n' + block("doc/experiment.md", "vm = {img")
    found = matrix.cells(definition.parse_definition(tomllib.loads(text), "e.toml"))
    assert [matrix.label(cell) for cell in found] == ["bare", "guest vcpus=1", "guest vcpus=2"]


# -- the site config ---------------------------------------------------------------------------


def site(tmp_path, text):
    tmp_path.chmod(0o755)
    path = tmp_path / "vtorque.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("page", "config"), [("config", "[options.img]"), ("ten-minutes-admin", "[options.ram]")]
)
def test_commands_that_inspect_a_config_succeed(tmp_path, page, config):
    """The commands of the page, on a config of the page, as an existing user."""
    path = site(tmp_path, block(f"doc/{page}.md", config))
    for line in block(f"doc/{page}.md", "vtorque config check").splitlines():
        words = re.sub("USER|ada", "root", line.partition("#")[0]).split()[2:]
        file = [] if words == ["example"] else ["--file", str(path)]
        done = CliRunner().invoke(config_command, [*words, *file])
        assert (done.exit_code, bool(done.stdout)) == (0, True), (line, done.exception)


def test_explain_prints_the_text_of_the_page(tmp_path, monkeypatch):
    path = site(tmp_path, block("doc/config.md", LIMITS) + '[batch]\nsystem = "slurm"\n')
    facts = {"user": ("ada",), "group": ("ada", "chem")}
    monkeypatch.setattr(explain, "facts_of_user", lambda _: facts)
    command, *shown = block("doc/config.md", "$ vtorque config explain").splitlines()
    done = CliRunner().invoke(explain.explain, [*command.split()[4:], "--file", str(path)])
    told = done.output.replace(str(path), "/etc/vtorque/vtorque.toml").splitlines()
    assert len(told) == len(shown)
    for said, line in zip(told, shown, strict=True):
        wanted = re.escape(" ".join(line.split())).replace(r"\.\.\.", ".*")
        assert re.fullmatch(wanted, " ".join(said.split()))


def test_refusal_has_the_text_of_the_page():
    node = PlannedNode.make(load_with_core("none"), block("doc/config.md", "[options.img]\n"))
    with pytest.raises(Refused) as caught:
        node.request("ram=128G")
    assert str(caught.value) in block("doc/config.md", "ram=128G")


# -- Nothing is left out ---------------------------------------------------------------------------

FIRST_PLUGIN = "tests/e2e/test_first_plugin.py::test_commands_of_the_page_print_the_shown_output"
FRESH = "tests/e2e/test_fresh_machine.py::test_readme_runs_a_job_without_root"
LAPTOP = "tests/e2e/test_personal.py::test_first_jobs_of_the_manual_run"
EXAMPLE = "tests/unit/repository/test_docs.py::test_every_block_of_the_example_is_used"
UNITS = "tests/unit/repository/test_docs.py::test_units_of_the_reaper_are_valid"
CLOUD = (
    "plugins/linux-guest/tests/boot/test_cloud_init.py::test_cloud_config_in_the_manuals_is_valid"
)
# Page and test to the first words of the blocks that it runs, or reads like their users.
RUN = {
    ("README.md", FRESH): ("apt-get", "scripts/wheels"),
    ("doc/admin.md", UNITS): (
        "[Unit]\nDescription=Release resources of ended vTorque jobs\n",
        "[Unit]\nDescription=Release resources of ended vTorque jobs, ",
    ),
    ("doc/batch.md", f"{HERE}::test_service_in_a_guest_is_reached_by_its_solvers"): (
        "#!/bin",
        "#PBS",
    ),
    ("doc/config.md", f"{HERE}::test_commands_that_inspect_a_config_succeed"): (
        "vtorque config check",
    ),
    ("doc/config.md", f"{HERE}::test_explain_prints_the_text_of_the_page"): (
        "$ vtorque config explain",
    ),
    ("doc/experiment.md", f"{HERE}::test_experiment_of_the_page_runs"): (
        "#!/bin/bash",
        "title =",
        "$ vmgr",
    ),
    ("doc/experiment.md", f"{HERE}::test_experiment_with_a_vm_key_in_the_matrix_runs"): (
        "vm = {img",
    ),
    ("doc/first-plugin.md", FIRST_PLUGIN): (
        "/usr/bin/python3 -m venv",
        "vtorque plugins new",
        "echo",
        "vsub --dry-run",
        "ruff",
        "mypy",
        "vsub -W",
        '"""Define the',
        '"""Tests of',
        "--- ",
    ),
    ("doc/guests.md", CLOUD): ("#cloud-config",),
    ("doc/images.md", f"{HERE}::test_recipes_are_valid"): ("family =",),
    ("doc/logging.md", f"{HERE}::test_log_line_of_the_page_is_printed"): ("{",),
    ("doc/logging.md", f"{HERE}::test_entry_points_are_in_a_known_group"): ("[project",),
    ("doc/osv.md", f"{HERE}::test_recipes_are_valid"): ("loader =",),
    ("examples/plugin/README.md", EXAMPLE): (
        "[build-system]",
        '"""-vm fpga',
        '"""Acme FPGA',
        "{% set",
    ),
    (
        "examples/plugin/README.md",
        "tests/unit/plan/test_claim_examples.py::test_all_examples_work_together",
    ): ("from vtorque_core.api.claims",),
    (
        "doc/plugins.md",
        "tests/unit/plan/test_claim_examples.py::test_cores_are_added_to_a_running_guest",
    ): ("from vtorque_core.live.cores",),
    (
        "doc/plugins.md",
        "tests/e2e/test_hypervisor.py::test_guest_is_restored_from_a_template_or_booted_cold",
    ): ("from pathlib import Path\n\nfrom vtorque_core.api import HostFault",),
    ("doc/pool.md", CLOUD): (
        "#cloud-config\nwrite_files:\n- path: /etc/munge",
        "#cloud-config\nwrite_files:\n- path: /var/spool/torque",
    ),
    ("doc/pool.md", f"{HERE}::test_entry_points_are_in_a_known_group"): ("[project",),
    ("doc/telemetry.md", f"{HERE}::test_metrics_reported_as_in_the_manual_are_parsed"): (
        'echo "loss',
    ),
    ("doc/telemetry.md", f"{HERE}::test_entry_points_are_in_a_known_group"): ("[project",),
    ("doc/ten-minutes-admin.md", f"{HERE}::test_commands_that_inspect_a_config_succeed"): (
        "vtorque config",
    ),
    ("doc/ten-minutes-admin.md", LAPTOP): ("echo",),
    (
        "doc/ten-minutes-user.md",
        f"{HERE}::test_first_jobs_of_the_manual_print_the_expected_output",
    ): ("echo",),
    ("doc/ten-minutes-user.md", f"{HERE}::test_scripts_request_valid_options"): ("#VSUB",),
    ("doc/ten-minutes-user.md", LAPTOP): ("vsub -j oe", "vmgr ps"),
    ("doc/software.md", CLOUD): ("#cloud-config",),
    ("doc/tutorial.md", f"{HERE}::test_study_estimates_pi"): (
        "#!/bin/sh",
        "#!/usr/bin/python3",
        "title =",
    ),
    ("doc/tutorial.md", LAPTOP): ("vsub -j oe -o pi.out pi.sh",),
    ("doc/user.md", f"{HERE}::test_first_jobs_of_the_manual_print_the_expected_output"): (
        "#!/bin/bash",
    ),
    ("doc/user.md", LAPTOP): ("$ vsub",),
    ("plugins/unclot/README.md", f"{HERE}::test_shared_memory_of_guests_runs"): ("import mmap",),
}
# Blocks that no test runs: the reason, the page, and how each block begins. test_docs_blocks.py
# checks the commands, options, keys and files in these blocks.
NOT_RUN = {
    "sets up a machine as root: scripts/node and scripts/cluster do the same for each e2e test": {
        "doc/admin.md": (
            "/usr/bin/python3 -m venv build",
            "/usr/bin/python3 -m venv /opt",
            "build/bin/pip wheel",
            "/opt/vtorque/bin/python3",
            "$ /opt/vtorque/bin/vtorque setup",
            "vmgr images build micro micro\n",
            "vtorque local stop",
            "/opt/vtorque/bin/pip install --no-index --find-links wheels vtorque-cluster",
            "/opt/vtorque/bin/pip install --no-index --find-links wheels vtorque-core",
        ),
        "doc/batch-pbs.md": ("/opt/vtorque/bin/pip",),
        "doc/batch-slurm.md": ("vtorque setup",),
        "doc/laptop.md": ("scripts/wheels", "apt-get"),
        "doc/local.md": ("vtorque local serve",),
        "doc/ten-minutes-admin.md": (
            "scripts/node",
            "/opt/vtorque/bin/vtorque setup",
            "vmgr images build",
            "vtorque local stop",
        ),
        "plugins/local/README.md": ("pip install",),
        "plugins/pbs/README.md": ("pip install",),
        "plugins/slurm/README.md": ("pip install",),
    },
    "CI runs these commands, or they run the tests": {
        "CONTRIBUTING.md": ("scripts/node", "ruff"),
        "doc/benchmarks.md": ("scripts/node", "scripts/machine"),
        "doc/dependencies.md": ("export PIP", "/opt/vtorque/bin/pip", "scripts/sbom"),
    },
    "a list of commands with one's own jobs, images, files and nodes in them": {
        "doc/admin.md": ("cp ...",),
        "doc/batch-slurm.md": ("sbatch --vm",),
        "doc/experiment.md": (
            "vmgr experiment run FILE",
            "vmgr experiment results",
            "vmgr experiment compare OLD NEW  ",
            "vmgr experiment compare OLD NEW --fail",
        ),
        "doc/guests.md": ("vmgr images label",),
        "doc/images.md": (
            "vmgr images list",
            "vmgr images sign debian --key",
            "vmgr images sign debian --payload",
            "vmgr images add",
            "vmgr images sync",
            "vmgr images build fluid",
        ),
        "doc/logging.md": ("vmgr logs",),
        "doc/osv.md": ("vmgr images build",),
        "doc/pool.md": ("vtorque pool config", "vmgr images build", "vtorque pool simulate"),
        "doc/report.md": ("vmgr ps",),
        "doc/survive.md": (
            "vmgr suspend",
            "vmgr checkpoint",
            "qhold",
            "vtorque drain",
            "vmgr migrate",
            "#!/bin/sh",
        ),
        "doc/software.md": ("printf", "vmgr images build hpc", "skopeo"),
        "doc/ten-minutes-user.md": ("vsub -h", "vsub -l nodes"),
        "doc/tutorial.md": (
            "vmgr logs",
            "vsub -j oe -o pi.out -v N",
            "vsub -t",
            "vmgr images list",
            "vsub -v N",
            "vmgr experiment run",
        ),
        "doc/user.md": ("vsub -vm", "vmgr ps"),
        "plugins/own-images/README.md": (
            "vsub -vm img=docker://registry",
            "vsub -vm img=docker://debian",
            "mkdir -p ~/first",
            "vsub -vm img=./debian",
            "vmgr images save",
        ),
    },
    "shows what jobs and nodes of one time were": {
        "doc/admin.md": ("$ vtorque doctor", "$ vtorque reap"),
        "doc/batch-slurm.md": ("$ sacct",),
        "doc/placement.md": ("$ vmgr ps",),
        "doc/report.md": ("$ vmgr report 1234", "$ vmgr report 22"),
    },
    "needs a registry of containers, OSv's loader, resctrl, or Prometheus": {
        "doc/images.md": ("skopeo",),
        "doc/osv.md": ("#!/bin/bash",),
        "doc/telemetry.md": ("scrape_configs",),
        "plugins/scam/README.md": ("mount -t resctrl",),
    },
}
NO_CODE = ("text",)  # output, formats, lines of other programs' files


def is_install(block):
    """Return whether it only installs this checkout's distributions (see test_docs_blocks.py)."""
    return block.language == "sh" and all(
        re.match(r"pip install \.", line) for line in block.text.splitlines()
    )


def test_each_block_is_run_or_has_a_reason():
    named = [(page, begin) for (page, _), begins in RUN.items() for begin in begins]
    for pages in NOT_RUN.values():
        named += [(page, begin) for page, begins in pages.items() for begin in begins]
    rest = [
        b for b in every()
        if b.language not in NO_CODE and not is_site_config(b) and not is_install(b)
    ]  # fmt: skip
    times = {
        b.where: sum(b.page == page and b.text.startswith(begin) for page, begin in named)
        for b in rest
    }
    assert {where: count for where, count in times.items() if count != 1} == {}
    assert len(rest) == len(named), "RUN or NOT_RUN names a block that does not exist"


def test_no_text_is_code():
    code = re.compile(r"^(?:class|def|from|import) ", re.MULTILINE)
    assert [b.where for b in every() if b.language == "text" and code.search(b.text)] == []


def test_tests_that_run_blocks_exist():
    for page, test in RUN:
        file, _, name = test.partition("::")
        text = (REPO / file).read_text()
        assert f"def {name}(" in text and Path(page).stem.partition(".")[0] in text, test
