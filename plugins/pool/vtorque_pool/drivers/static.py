"""Driver for existing machines, whose nodes join and leave the batch system.

Options:

- ``machines``: names of the machines' nodes (``big[1-4]``).
- ``state``: directory with one file for each machine in use.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path

from vtorque_core.api import name_errors, replace_file
from vtorque_pool.api import CloudFault, Driver, Machine, MachineOrder, StockOut
from vtorque_pool.hostlist import expand


def driver(options: Mapping[str, str]) -> Driver:
    """Return the driver."""
    place = Path(options.get("state", "/var/lib/vtorque-pool/static"))
    return Static(expand(options.get("machines", "")), place)


class Static:
    """The driver of existing machines."""

    def __init__(self, names: tuple[str, ...], place: Path) -> None:
        self._names = names
        self._place = place

    def create(self, order: MachineOrder) -> Machine:
        """Record that the machine with the name ``order.node`` is in use."""
        if order.node not in self._names:
            raise StockOut(f"{order.node} is not one of the static machines")
        now = time.time()
        note = [order.cluster, order.node, order.shape, now]
        with name_errors(self._place, fault=CloudFault):
            self._place.mkdir(mode=0o755, parents=True, exist_ok=True)
            replace_file(str(self._file(order.node)), json.dumps(note).encode(), mode=0o644)
        return Machine(order.node, order.node, order.shape, now)

    def machines(self, cluster: str) -> list[Machine]:
        """Return the machines in use."""
        found = []
        for name in self._names:
            try:
                whose, node, shape, created = json.loads(self._file(name).read_bytes())
            except FileNotFoundError:
                continue
            except (OSError, ValueError) as error:
                raise CloudFault(f"{self._file(name)}: {error}") from None
            if whose == cluster:
                found.append(Machine(name, node, shape, created))
        return found

    def destroy(self, machine: str) -> None:
        """Mark a machine as free; it keeps running."""
        if machine in self._names:
            with name_errors(self._file(machine), fault=CloudFault):
                self._file(machine).unlink(missing_ok=True)

    def quota(self) -> int | None:
        """Return how many machines are free."""
        return sum(not self._file(name).exists() for name in self._names)

    def _file(self, name: str) -> Path:
        return self._place / f"{name}.json"
