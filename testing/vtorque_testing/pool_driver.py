"""Contract that every driver of the pool passes (``vtorque1.pool``).

Example::

    class TestMyCloud(PoolDriverContract):
        @pytest.fixture
        def cloud(self, tmp_path):
            return MyCloudHarness(tmp_path)

Requires ``vtorque-pool``.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import pytest

from vtorque_pool.api import CloudFault, Driver, Machine, MachineOrder, StockOut

_WAIT = 60.0  # seconds until a cloud must have finished an operation


class DriverHarness(Protocol):
    """The real driver, with a real or simulated cloud."""

    def driver(self) -> Driver:
        """Return a new driver of the same cloud, as another process would create it."""
        ...

    def order(self, node: str, cluster: str = "contract") -> MachineOrder:
        """Return an order that this cloud can fulfill."""
        ...

    def stranger(self) -> str:
        """Create a machine without vTorque's tags, through the cloud's own API; return its id."""
        ...

    def list_machines(self) -> set[str]:
        """Return the ids of all machines that are not being deleted, with or without tags."""
        ...

    def silence(self) -> contextlib.AbstractContextManager[None]:
        """Make the cloud unresponsive while the context is active."""
        ...

    def exhaust(self) -> contextlib.AbstractContextManager[None]:
        """Make the cloud run out of capacity while the context is active."""
        ...

    def user_data(self, machine: str) -> bytes | None:
        """Return a machine's user data, or None if the cloud does not support user data."""
        ...


class PoolDriverContract:
    """Tests of a pool driver. A subclass overrides the fixture ``cloud``."""

    @pytest.fixture
    def cloud(self) -> DriverHarness:
        """Return the harness of the driver under test."""
        raise NotImplementedError

    @pytest.fixture
    def driver(self, cloud: DriverHarness) -> Iterator[Driver]:
        """Return a driver, and destroy its machines after the test."""
        driver = cloud.driver()
        yield driver
        for cluster in ("contract", "another"):
            for machine in driver.machines(cluster):
                driver.destroy(machine.id)

    def test_created_machine_is_listed_with_its_tags(
        self, cloud: DriverHarness, driver: Driver
    ) -> None:
        """The cloud must store node, shape and creation time of each machine."""
        before = time.time()
        made = driver.create(cloud.order("n1"))
        [found] = driver.machines("contract")
        assert (found.id, found.node, found.shape) == (made.id, "n1", cloud.order("n1").shape)
        assert before - 120 < found.created < time.time() + 120
        assert found.is_live and made.is_live

    def test_new_driver_lists_all_machines(self, cloud: DriverHarness, driver: Driver) -> None:
        """A new driver must list machines that another process created."""
        made = {driver.create(cloud.order(name)).id for name in ("n1", "n2")}
        other = cloud.driver()
        assert {each.id for each in other.machines("contract")} == made
        other.destroy(sorted(made)[0])
        assert _live_machines(driver) == {sorted(made)[1]}

    def test_machines_of_other_clusters_are_not_listed(
        self, cloud: DriverHarness, driver: Driver
    ) -> None:
        """``machines()`` must not list another cluster's machines: the pool may destroy them."""
        stranger = cloud.stranger()
        other = driver.create(cloud.order("n2", "another"))
        mine = driver.create(cloud.order("n1"))
        assert [each.id for each in driver.machines("contract")] == [mine.id]
        assert [each.id for each in driver.machines("another")] == [other.id]
        assert stranger not in {mine.id, other.id}

    def test_only_the_given_machine_is_destroyed(
        self, cloud: DriverHarness, driver: Driver
    ) -> None:
        """``destroy()`` must delete the given machine from the cloud, and no other."""
        stranger = cloud.stranger()
        first, second = (driver.create(cloud.order(name)) for name in ("n1", "n2"))
        driver.destroy(first.id)
        _wait_until(lambda: first.id not in cloud.list_machines())
        assert {second.id, stranger} - {""} <= cloud.list_machines()
        assert _live_machines(driver) == {second.id}

    def test_destroy_is_idempotent(self, cloud: DriverHarness, driver: Driver) -> None:
        """``destroy()`` must be idempotent, because an interrupted call is repeated."""
        made = driver.create(cloud.order("n1"))
        driver.destroy(made.id)
        driver.destroy(made.id)
        _wait_until(lambda: _live_machines(driver) == set())
        driver.destroy(made.id)

    def test_silent_cloud_raises_cloud_fault(self, cloud: DriverHarness, driver: Driver) -> None:
        """The driver must raise CloudFault if the cloud does not answer.

        If ``machines()`` returned an empty list, vTorque would consider all nodes lost.
        """
        made = driver.create(cloud.order("n1"))
        with cloud.silence():
            with pytest.raises(CloudFault):
                cloud.driver().machines("contract")
            with pytest.raises(CloudFault):
                cloud.driver().create(cloud.order("n2"))
            with pytest.raises(CloudFault):
                cloud.driver().destroy(made.id)
        assert _live_machines(driver) == {made.id}

    def test_full_cloud_raises_stock_out_and_leaves_nothing(
        self, cloud: DriverHarness, driver: Driver
    ) -> None:
        """If the cloud has no capacity, the driver must raise StockOut and leave no machine.

        vTorque then creates no machines of this shape for some time.
        """
        before = cloud.list_machines()
        with cloud.exhaust(), pytest.raises(StockOut):
            driver.create(cloud.order("n1"))
        assert cloud.list_machines() == before
        assert driver.machines("contract") == []

    def test_concurrently_created_machines_are_all_listed(
        self, cloud: DriverHarness, driver: Driver
    ) -> None:
        """A driver must be thread-safe, and ``machines()`` must read all pages of a long list."""
        names = [f"n{number}" for number in range(1, 7)]
        with ThreadPoolExecutor(6) as threads:
            list(threads.map(lambda name: driver.create(cloud.order(name)), names))
        assert sorted(each.node for each in driver.machines("contract")) == names
        left = driver.quota()
        assert left is None or left >= 0

    def test_user_data_arrives_unchanged(self, cloud: DriverHarness, driver: Driver) -> None:
        """A machine must get its user data byte for byte."""
        made = driver.create(cloud.order("n1"))
        found = cloud.user_data(made.id)
        assert found is None or found == cloud.order("n1").user_data


def _live_machines(driver: Driver) -> set[str]:
    return {each.id for each in _machines(driver) if each.is_live}


def _machines(driver: Driver) -> list[Machine]:
    return driver.machines("contract")


def _wait_until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + _WAIT
    while not done():
        assert time.monotonic() < end, f"not after {_WAIT:g} s"
        time.sleep(0.05)
