"""Guests as the core would have planned them, and the one plugin that is asked about them."""

from pathlib import Path
from typing import Any

from vtorque_core.api import vm_options
from vtorque_core.api.guest_plan import GuestPlan, JobUser
from vtorque_core.api.values import Image, JobRequest
from vtorque_core.api.vm_options import RAM, VCPUS, VMS_PER_NODE
from vtorque_core.base.names import JobAttempt
from vtorque_core.site.plugins import Plugins

ADA = JobUser("ada", 1000, 1000, (("ada", 1000),), "/home/ada", "/bin/bash")
MICRO = Image("micro", "linux", "micro", "x86_64", "0" * 64)


def guest_plan(**changes: Any) -> GuestPlan:
    """Return the only guest of a job that asked for nothing, with these fields otherwise."""
    values: dict[str, Any] = {
        "job": JobAttempt("42.srv", 0, "ada", 1000, "n1"), "index": 0, "rank": 0,
        "guests_per_node": 1, "name": "vt-42.srv.0-n1-0",
        "uuid": "0b1ad9ba-95f3-54cf-8d96-1d6ed3e4ac1f", "hostname": "vn1",
        "vcpus": 1, "ram_mib": 512, "image": MICRO, "user": ADA, "request": JobRequest({}),
        "addresses": (), "peers": (), "state_dir": Path("/s"), "run_dir": Path("/r"),
        "secret": b"x" * 32,
    }  # fmt: skip
    return GuestPlan(**values | changes)


def of_request(request: JobRequest, **changes: Any) -> GuestPlan:
    """Return the first guest of a node's, of the size and number that the job asked for."""
    size = {"vcpus": request[VCPUS], "ram_mib": request[RAM]}
    more = {"request": request, "guests_per_node": request[VMS_PER_NODE]}
    return guest_plan(**size | more | changes)


def with_core(name: str, *modules: object) -> Plugins:
    """Return the core's options and a plugin's modules, as they are found together."""
    found = Plugins()
    found.register("core", vm_options, "vtorque-core")
    for module in modules:
        found.register(name, module, f"vtorque-{name} 1.0.0")
    return found
