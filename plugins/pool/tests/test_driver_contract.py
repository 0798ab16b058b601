"""The contract of drivers: the static driver and a double pass it, five defective ones fail."""

import contextlib
import inspect

import pytest

from directory_cloud import BROKEN, DirectoryHarness
from vtorque_pool.api import MachineOrder
from vtorque_pool.drivers import static
from vtorque_testing.pool_driver import PoolDriverContract


class TestDirectory(PoolDriverContract):
    @pytest.fixture
    def cloud(self, tmp_path):
        return DirectoryHarness(tmp_path)


class StaticHarness:
    """Six machines that always exist; a stranger is one that no cluster uses."""

    def __init__(self, directory):
        self.directory = directory
        self.is_full = False

    def driver(self):
        return static.driver({"machines": "n[1-6]", "state": str(self.directory / "state")})

    def order(self, node, cluster="contract"):
        return MachineOrder(cluster, "other" if self.is_full else node, "big")

    def stranger(self):
        return ""

    def list_machines(self):
        found = [m.id for c in ("contract", "another") for m in self.driver().machines(c)]
        return set(found)

    @contextlib.contextmanager
    def silence(self):
        state, away = self.directory / "state", self.directory / "away"
        state.rename(away)
        state.write_text("no directory")
        try:
            yield
        finally:
            state.unlink()
            away.rename(state)

    @contextlib.contextmanager
    def exhaust(self):
        """Request a machine that does not exist: the number of machines is fixed."""
        self.is_full = True
        yield
        self.is_full = False

    def user_data(self, machine):
        return None


class TestStatic(PoolDriverContract):
    @pytest.fixture
    def cloud(self, tmp_path):
        return StaticHarness(tmp_path)


@pytest.mark.parametrize("kind", BROKEN, ids=lambda kind: kind.__name__)
def test_defect_of_a_driver_is_found(tmp_path, kind):
    class Harness(DirectoryHarness):
        pass

    Harness.kind = kind
    contract = PoolDriverContract()
    failed = []
    for name, test in inspect.getmembers(contract, inspect.ismethod):
        if name.startswith("test_"):
            place = tmp_path / name
            place.mkdir()
            cloud = Harness(place)
            try:
                test(cloud, cloud.driver())
            except BaseException:
                failed.append(name)
    assert BROKEN[kind] in failed
    assert len(failed) < 5
