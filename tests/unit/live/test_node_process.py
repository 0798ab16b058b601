"""A plugin's one process of a node: how it is called, started and begins."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from vtorque_core.base.errors import HostFault
from vtorque_core.live.node_process import NodeProcess
from vtorque_core.records.reading import arguments


class Watcher(NodeProcess):
    kind = "acme-watcher"
    name = "acme"
    module = "vtorque_acme.watcher"


def test_it_is_a_module_of_the_plugins_known_by_its_lock_alone(paths):
    one = Watcher.of(paths, Path("/etc/x.toml"), 0.5)
    where = (str(paths.state), str(paths.run))
    assert one.argv == (
        sys.executable,
        "-I",
        "-m",
        "vtorque_acme.watcher",
        *where,
        "/etc/x.toml",
        "0.5",
    )
    assert one.lock == f"{paths.run}/acme.lock" and one.scope == "node"
    assert arguments(one) == arguments(Watcher.of(paths, Path("/etc/other.toml")))


@pytest.mark.parametrize("fault", [None, HostFault("/run: no space left on device")])
def test_a_job_whose_node_cannot_start_it_runs_and_is_told(paths, fault):
    acquired, told = [], []

    def acquire(resource):
        if fault:
            raise fault
        acquired.append(resource)

    site = SimpleNamespace(paths=paths, path=Path("/etc/x.toml"))
    Watcher.start(SimpleNamespace(site=site, acquire=acquire, warn=told.append), "is not watched")
    if fault:
        assert (acquired, told) == ([], [f"is not watched: {fault}"])
    else:
        assert (acquired, told) == ([Watcher.of(paths, site.path)], [])


def test_its_log_is_roots_alone(tmp_path):
    program = (
        "import logging; from vtorque_core.live.node_process import begin;"
        "print(*begin('acme')); logging.getLogger('acme').info('watching')"
    )
    argv = [sys.executable, "-I", "-c", program, tmp_path, tmp_path / "run", "a", "b"]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=60)
    assert f"'{tmp_path}/run'" in done.stdout and done.stdout.endswith("['a', 'b']\n")
    log = tmp_path / "acme.log"
    assert log.read_text().endswith(" watching\n")
    assert log.stat().st_mode & 0o077 == 0
