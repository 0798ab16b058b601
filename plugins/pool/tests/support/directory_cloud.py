"""A double of a cloud in a directory, for the contract and for tests of decisions."""

import contextlib
import json
import time
import uuid
from pathlib import Path

from vtorque_pool.api import CloudFault, Machine, MachineOrder, StockOut


class DirectoryDriver:
    """A correct driver; its machines are files."""

    def __init__(self, directory):
        self.directory = Path(directory)
        self.asked = []

    def create(self, order):
        self.answer()
        self.asked.append(order.node)
        if (self.directory / "full").exists():
            raise StockOut("full")
        name = f"m-{uuid.uuid4().hex[:8]}"
        created = time.time()
        data = [order.cluster, order.node, order.shape, created, order.user_data.decode()]
        (self.directory / f"{name}.json").write_text(json.dumps(data))
        return Machine(name, order.node, order.shape, created)

    def machines(self, cluster):
        self.answer()
        return [m for whose, m in self.all() if whose == cluster]

    def all(self):
        for path in sorted(self.directory.glob("m-*.json")):
            whose, node, shape, created, _ = json.loads(path.read_text())
            yield whose, Machine(path.stem, node, shape, created)

    def destroy(self, machine):
        self.answer()
        (self.directory / f"{machine}.json").unlink(missing_ok=True)

    def quota(self):
        return None

    def answer(self):
        if (self.directory / "down").exists():
            raise CloudFault("no answer")


class DirectoryHarness:
    """See vtorque_testing.pool_driver.DriverHarness."""

    kind = DirectoryDriver

    def __init__(self, directory):
        self.directory = directory

    def driver(self):
        return self.kind(self.directory)

    def order(self, node, cluster="contract"):
        return MachineOrder(cluster, node, "small", user_data=b"#cloud-config\n")

    def stranger(self):
        path = self.directory / "m-stranger.json"
        path.write_text(json.dumps(["", "", "", 1.0, ""]))
        return path.stem

    def list_machines(self):
        return {path.stem for path in self.directory.glob("m-*.json")}

    @contextlib.contextmanager
    def _marked(self, name):
        (self.directory / name).touch()
        try:
            yield
        finally:
            (self.directory / name).unlink()

    def silence(self):
        return self._marked("down")

    def exhaust(self):
        return self._marked("full")

    def user_data(self, machine):
        return json.loads((self.directory / f"{machine}.json").read_text())[4].encode()


# -- Five defective drivers; the contract detects each ---------------------------------------------


class ListsAllClusters(DirectoryDriver):
    def machines(self, cluster):
        self.answer()
        return [m for _, m in self.all()]


class RememberingDriver(DirectoryDriver):
    """A driver that knows only machines that it has created itself."""

    def __init__(self, directory):
        super().__init__(directory)
        self.made = []

    def create(self, order):
        self.made.append(super().create(order).id)
        return next(m for _, m in self.all() if m.id == self.made[-1])

    def machines(self, cluster):
        return [m for m in super().machines(cluster) if m.id in self.made]


class EmptyWhenSilent(DirectoryDriver):
    def machines(self, cluster):
        try:
            return super().machines(cluster)
        except CloudFault:
            return []


class RefusesWhatIsGone(DirectoryDriver):
    def destroy(self, machine):
        self.answer()
        try:
            (self.directory / f"{machine}.json").unlink()
        except FileNotFoundError:
            raise CloudFault("no such machine") from None


class LeavesHalf(DirectoryDriver):
    """A driver whose ``create()`` creates a machine and fails afterwards."""

    def create(self, order):
        self.answer()
        full = self.directory / "full"
        if full.exists():
            full.rename(self.directory / "was-full")
            super().create(order)
            (self.directory / "was-full").rename(full)
        return super().create(order)


BROKEN = {
    ListsAllClusters: "test_machines_of_other_clusters_are_not_listed",
    RememberingDriver: "test_new_driver_lists_all_machines",
    EmptyWhenSilent: "test_silent_cloud_raises_cloud_fault",
    RefusesWhatIsGone: "test_destroy_is_idempotent",
    LeavesHalf: "test_full_cloud_raises_stock_out_and_leaves_nothing",
}
