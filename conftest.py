"""Run unit tests on all cores, and e2e tests one after the other.

In the whole quick run each process collects and runs its own share of the files.

An e2e test checks that the machine is as it was before, so nothing else may run at the same time.
With ``--machines N`` they run in N machines of ``scripts/machine`` at once, each with its own node.
"""

import ctypes
import functools
import gc
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers
from xdist.scheduler import EachScheduling, LoadScopeScheduling
from xdist.workermanage import WorkerController

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # mallopt(3)
_MADV_COLLAPSE = 25  # madvise(2), since Linux 6.1
_LARGE = 4 << 20  # bytes
_ALL_E2E = re.compile(rb"^pytestmark = (\[[^]]*)?pytest\.mark\.e2e\b", re.MULTILINE)


# Files that share a Slurm cluster; two clusters, because one would be at work after all else.
_CLUSTER, _OTHER_CLUSTER = "tests/e2e/slurm", "tests/e2e/slurm (second)"
_OF_OTHER_CLUSTER = re.compile(f"{_CLUSTER}/test_slurm_(own|spank|clients|gen|acc|arch)")
_SPLIT = "tests/e2e/test_wild_scripts.py"  # each function takes half an hour
_FIRST = (
    _CLUSTER,  # the first machine builds the prefix and the image, without which others would wait
    "tests/unit/repository/test_docs_site.py",
    "plugins/survive/tests/test_checkpoint.py",
    "plugins/survive/tests/test_migration.py",
    _OTHER_CLUSTER,
    "tests/e2e/test_warm.py",
    "tests/e2e/test_personal.py",
    "tests/e2e/test_own_images.py",
    "tests/e2e/test_job.py",
    "tests/e2e/test_bad_start.py",
    "tests/e2e/test_images.py",
    "tests/e2e/test_faults.py",
    "tests/e2e/guest_root/test_attacks.py",
    "tests/e2e/test_userdisk.py",
    "tests/e2e/test_packet_filter.py",
    "tests/e2e/test_hypervisor.py",
    "plugins/joblog/tests/test_sinks_process.py",
    "tests/e2e/test_guests_of_site.py",
    "tests/e2e/test_user_input.py",
    "tests/e2e/test_user_attacks.py",
    "tests/e2e/test_pinning.py",
    "tests/e2e/test_log.py",
    "tests/e2e/test_experiment.py",
    "tests/e2e/guest_root/test_attacks_network.py",
    "plugins/pool/tests/test_ec2.py",
    "plugins/pool/tests/test_real_slurm.py",
    "tests/e2e/test_setup.py",
    "tests/e2e/test_telemetry.py",
    "tests/e2e/test_suspend.py",
    "tests/e2e/test_virtiofs.py",
)  # then each longer than what follows; the other files fill up the machines in the end

# Seconds of the files that take longest in the quick run; those of the others follow from the size.
_SECONDS = {
    "plugins/experiment/tests/test_experiment_attacks.py": 22,
    "plugins/experiment/tests/test_experiment_runner.py": 17,
    "plugins/own-images/tests/test_pull.py": 14,
    "tests/unit/cli/test_surroundings.py": 9,
    "plugins/linux-guest/tests/job/test_guest_contract.py": 8,
    "plugins/oci/tests/test_oci.py": 7,
    "plugins/linux-guest/tests/job/test_run_job.py": 6,
    "tests/unit/node/test_epilogue.py": 5,
    "plugins/linux-guest/tests/boot/test_setup_script.py": 5,
    "plugins/survive/tests/test_watcher.py": 4,
    "plugins/report/tests/test_report_page.py": 4,
    "plugins/report/tests/test_report_text.py": 4,
    "plugins/slurm/tests/test_spank.py": 4,
    "tests/unit/repository/test_contributing.py": 4,
    "tests/unit/cli/test_cli.py": 3,
    "tests/unit/cli/test_vsub.py": 3,
    "tests/unit/cli/test_entry.py": 3,
    "plugins/oci/tests/test_unprivileged.py": 3,
    "plugins/oci/tests/test_pool.py": 3,
    "plugins/pbs/tests/test_batch_commands.py": 3,
    "plugins/pbs/tests/test_held.py": 3,
    "plugins/pbs/tests/test_openpbs_setup.py": 3,
    "plugins/pbs/tests/test_submitter.py": 3,
    "plugins/survive/tests/test_shared_store.py": 3,
    "plugins/images/tests/test_commands.py": 3,
    "plugins/linux-guest/tests/agent/test_lines.py": 3,
    "plugins/linux-guest/tests/agent/test_setup.py": 3,
    "plugins/linux-guest/tests/job/test_stream.py": 3,
    "plugins/archive/tests/test_archive.py": 3,
    "plugins/slurm/tests/test_srun.py": 3,
    "tests/unit/node/test_teardown.py": 3,
    "tests/unit/repository/test_supply.py": 3,
    "tests/unit/testing/test_fixtures.py": 3,
    "tests/unit/repository/test_words.py": 2,
    "tests/unit/repository/test_layout.py": 2,
    "plugins/pbs/tests/test_submit_filter.py": 2,
    "tests/unit/node/test_root_side.py": 2,
    "tests/unit/node/test_job_size_start.py": 2,
    "tests/unit/node/test_setup_batch.py": 2,
    "plugins/linux-guest/tests/agent/test_run.py": 2,
    "plugins/passthrough/tests/test_granted_start.py": 2,
    "plugins/pool/tests/test_command.py": 2,
    "plugins/images/tests/test_signed.py": 2,
    "plugins/linux-guest/tests/boot/test_cloud_init.py": 2,
    "plugins/osv/tests/test_console.py": 2,
    "tests/unit/cli/test_plugins.py": 2,
    "tests/unit/plan/test_domain_render.py": 2,
    "plugins/experiment/tests/test_experiment_check.py": 2,
    "tests/unit/api/test_unprivileged_parser.py": 2,
}
_BYTES = 18_000  # of other test files, in a second
_SHORT = 0.05  # seconds


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--machines``."""
    parser.addoption(
        "--machines",
        type=int,
        default=0,
        metavar="N",
        help="as root: run the tests in N machines of scripts/machine, each file in one of them",
    )


def _in_a_machine(config: pytest.Config) -> bool:
    return bool(config.option.machines) and hasattr(config, "workerinput")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip tests that need root for other users."""
    if os.geteuid() and item.get_closest_marker("root"):
        pytest.skip("needs root")


def pytest_cmdline_main(config: pytest.Config) -> None:
    """Start the workers of ``--machines``: each is a Python that scripts/machine runs."""
    if config.option.machines and not _in_a_machine(config):
        if os.geteuid():
            raise pytest.UsageError("--machines: scripts/machine must be run as root")
        python = shlex.join([str(config.rootpath / "scripts/machine"), sys.executable])
        config.option.dist = "loadscope"
        config.option.loadscopereorder = False
        config.option.tx = [f"popen//python={python}"] * config.option.machines
    elif _has_shares(config):
        config.option.maxworkerrestart = "0"  # a new process would have no share


def _scope(nodeid: str) -> str:
    if nodeid.startswith(_CLUSTER):
        return _OTHER_CLUSTER if _OF_OTHER_CLUSTER.match(nodeid) else _CLUSTER
    return nodeid.partition("[" if nodeid.startswith(_SPLIT) else "::")[0]


class _FileScheduling(LoadScopeScheduling):
    """Gives a worker that is free the next file, or all files that share a cluster.

    Long tests are worth a cluster in each machine.
    """

    def _split_scope(self, nodeid: str) -> str:
        if "not full" not in self.config.option.markexpr and nodeid.startswith(_CLUSTER):
            return nodeid.partition("::")[0]
        return _scope(nodeid)


class _ShareScheduling(EachScheduling):
    """Has each worker run the tests that it has collected; the progress counts all of them."""

    def add_node_collection(self, node: WorkerController, collection: Sequence[str]) -> None:
        super().add_node_collection(node, collection)
        collected = sum(map(len, self.node2collection.values()))
        self.config.pluginmanager.get_plugin("session").testscollected = collected


def pytest_xdist_make_scheduler(
    config: pytest.Config, log: object
) -> _FileScheduling | _ShareScheduling | None:
    """Schedule files with ``--machines``, shares in the quick run, and otherwise tests."""
    if config.option.machines:
        return _FileScheduling(config, log)
    return _ShareScheduling(config, log) if _has_shares(config) else None


def _has_shares(config: pytest.Config) -> bool:
    """Return whether this is the whole quick run.

    If each process collected all tests, that would take a quarter of all CPU time, and each fork
    would copy the modules of all tests.
    """
    return _is_quick(config) and config.args_source is pytest.Config.ArgsSource.TESTPATHS


@functools.cache
def _own_share(root: Path, number: int, count: int) -> frozenset[Path]:
    """Return the test files of one of ``count`` processes; all have about as much to do."""
    seconds = {}
    for top in ("tests", "plugins"):
        for path in root.joinpath(top).rglob("test_*.py"):
            is_e2e = path.is_relative_to(root / "tests/e2e") or _ALL_E2E.search(path.read_bytes())
            if not is_e2e:
                known = _SECONDS.get(str(path.relative_to(root)))
                seconds[path] = known or path.stat().st_size / _BYTES
    shares: list[list[Path]] = [[] for _ in range(count)]
    sums = [0.0] * count
    for path in sorted(seconds, key=lambda path: (-seconds[path], path)):
        least = sums.index(min(sums))
        shares[least].append(path)
        sums[least] += seconds[path]
    return frozenset(shares[number])


def _is_anothers(path: Path, config: pytest.Config) -> bool:
    """Return whether another process of the quick run has this test file."""
    worker = getattr(config, "workerinput", None)
    if worker is None or not _has_shares(config):
        return False
    number = int(worker["workerid"].removeprefix("gw"))
    return path not in _own_share(config.rootpath, number, worker["workercount"])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order the files so that all machines are busy from the begin to the end."""
    if config.option.machines:
        rank = {name: number for number, name in enumerate(_FIRST)}
        items.sort(key=lambda item: rank.get(_scope(item.nodeid), len(rank)))


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return the number of processes of ``-n auto``: 0 (this process only) if e2e tests may run.

    Half of the time of a quick test is a wait. The whole quick run has three processes for each
    core, since each collects only its share; other runs have two.
    """
    each = 3 if _has_shares(config) else 2
    return each * (os.cpu_count() or 1) if "not e2e" in (config.option.markexpr or "") else 0


def pytest_configure(config: pytest.Config) -> None:
    """Make properties of ``scripts/test --full`` thorough, and set up teardowns for xdist.

    A teardown must not wait for the thread that each xdist process has. Python's compiled files are
    kept regardless of the environment; otherwise each process compiles all of them each time.
    Without ``full`` the examples are the same in each run, and a fortieth of the number.
    """
    gc.disable()  # nothing of a collection is garbage; pytest_collection_finish enables it
    sys.dont_write_bytecode = False
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PATH"] += ":/usr/sbin:/sbin"  # Debian's users have no mke2fs without
    # Set, it stays: what was large goes back when it is freed, and no fork has to copy it.
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 20)
    ctypes.CDLL(None).mallopt(_M_TRIM_THRESHOLD, 16 << 20)
    calm = [HealthCheck.too_slow]  # reports the load of the machine, as a deadline does
    common = {"deadline": None, "suppress_health_check": calm}
    settings.register_profile("fast", max_examples=10, derandomize=True, **common)
    settings.load_profile("fast")
    if "e2e" in config.option.markexpr and "full" not in config.option.markexpr:
        settings.register_profile("full", max_examples=400, derandomize=False, **common)
        settings.load_profile("full")
    else:  # without the constants of the code: each process would parse all modules
        providers._get_local_constants = providers.Constants
    _compile_templates_once()
    if "PYTEST_XDIST_WORKER" in os.environ:
        if _has_shares(config):
            _send_only_results(config)
        from vtorque_core.node.end import teardown  # noqa: PLC0415

        teardown._THREADS_END = 0.0
        if _in_a_machine(config):
            config.option.basetemp = None  # xdist's is the host's, which the machine does not see
    elif _is_quick(config) and not config.option.basetemp and os.geteuid() == 0:
        _files_in_memory(config)


def _compile_templates_once() -> None:
    """Let all environments of a process share compiled templates: each domain has its own one."""
    compile_template = jinja2.Environment.compile
    known: dict[Any, Any] = {}

    def compile_once(environment: jinja2.Environment, *template: Any, **how: Any) -> Any:
        options = (environment.autoescape, environment.undefined, environment.trim_blocks,
                   environment.lstrip_blocks, environment.keep_trailing_newline)  # fmt: skip
        key = (*options, *template, *how.items())
        if key not in known:
            known[key] = compile_template(environment, *template, **how)
        return known[key]

    jinja2.Environment.compile = compile_once  # type: ignore[method-assign, assignment]


def _send_only_results(config: pytest.Config) -> None:
    """Send no start or end of a test, and no set-up or teardown that was short and passed.

    xdist sends five events for each test, which take as long as the median test.
    """
    (worker,) = (p for p in config.pluginmanager.get_plugins() if hasattr(p, "sendevent"))
    send = worker.sendevent

    def send_result(name: str, **event: Any) -> None:
        data = event.get("data", {})
        quiet = data.get("when") in ("setup", "teardown") and data["outcome"] == "passed"
        if name not in ("logstart", "logfinish") and not (quiet and data["duration"] < _SHORT):
            send(name, **event)

    worker.sendevent = send_result


def _is_quick(config: pytest.Config) -> bool:
    return all(words in config.option.markexpr for words in ("not e2e", "not full"))


def _files_in_memory(config: pytest.Config) -> None:
    """Give the tests a tmpfs that only their processes see; it ends with them.

    They create and remove tens of thousands of files. On ext4 without a journal each new file takes
    longer for minutes, since every recently removed inode is checked. With ``--basetemp`` files are
    written there, and kept.
    """
    from vtorque_testing.recorded_mounts import cover  # noqa: PLC0415

    top = Path(tempfile.mkdtemp(prefix="t-"))  # short: sockets are below
    config.add_cleanup(top.rmdir)
    try:
        cover({})
    except OSError:  # a container may not
        return
    mount = ["mount", "-t", "tmpfs", "-o", "mode=755", "vtorque-tests", top]
    if subprocess.run(mount, check=False, timeout=60).returncode:
        return
    config.add_cleanup(lambda: subprocess.run(["umount", "-l", top], check=True, timeout=60))
    config.option.basetemp = top / "p"
    (top / "tmp").mkdir(mode=0o1777)
    os.environ["TMPDIR"] = tempfile.tempdir = str(top / "tmp")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files without a wanted test: importing them takes seconds in each process."""
    words = config.option.markexpr
    if "not e2e" in words and collection_path == config.rootpath / "tests/e2e":
        return True
    if "e2e" not in words or not collection_path.match("test_*.py"):
        return None
    if _is_anothers(collection_path, config):
        return True
    text = collection_path.read_bytes()
    unwanted = _ALL_E2E.search(text) if "not e2e" in words else b"mark.e2e" not in text
    return True if unwanted else None


def pytest_collection_finish() -> None:
    """Exclude all current objects from garbage collection: each fork would copy them.

    Also collect rarely: the objects of tests are small, and freed with their last reference.
    """
    gc.freeze()
    _in_huge_pages()
    gc.set_threshold(100_000, 10, 10)
    gc.enable()


def pytest_runtest_teardown() -> None:
    """Fail if the test disabled garbage collection: descriptors in reference cycles stay open."""
    enabled = gc.isenabled()
    gc.enable()
    if not enabled:
        pytest.fail("the test disabled garbage collection", pytrace=False)


def _in_huge_pages() -> None:
    """Move this process's memory to huge pages: a fork takes half the time, and there are many.

    Where the kernel cannot, nothing changes.
    """
    libc = ctypes.CDLL(None)
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, access, _, _, inode, *name = line.split()
        begin, end = (int(address, 16) for address in place.split("-"))
        anonymous = inode == "0" and name in ([], ["[heap]"])
        if anonymous and access.startswith("rw") and end - begin >= _LARGE:
            libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), _MADV_COLLAPSE)
