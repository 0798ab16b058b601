"""The OSv plugin on the node: checks of requests, and resources."""

from __future__ import annotations

from collections.abc import Iterator

from vtorque_core.api import Refusal, deferred, hookimpl
from vtorque_core.api.guest_plan import GuestPlan
from vtorque_core.api.node_job import Site
from vtorque_core.api.vm_options import DISK, VM_EPILOGUE, VM_PROLOGUE
from vtorque_osv.settings import OSV_MODE, Settings


@hookimpl
def vtorque_plan(guest: GuestPlan, site: Site) -> Iterator[Refusal]:
    """Reject requests that OSv, this image or this site does not support."""
    image, mode = guest.image, guest[OSV_MODE]
    if image.guest_type != "osv":
        if "osv_mode" in guest.request.given:
            yield Refusal(f"image {image.name} is not OSv", key="osv_mode", value=mode)
        return
    from vtorque_osv import check  # noqa: PLC0415 - the batch system waits, and few guests are OSv

    for option in (VM_PROLOGUE, VM_EPILOGUE):
        if guest[option] is not None:
            yield Refusal(
                "is a script, which needs a shell, and OSv has none",
                key=option.key,
                value=option.show(guest[option]),
            )
    root = image.labels.get(check.ROOT)
    if root and not any(s.name == root and s.kind == "virtiofs" for s in guest.shares):
        yield Refusal(
            f"image {image.name} has its root file system in the share {root}, which is missing "
            "on this node",
            where=f"[shares.{root}]", fix="ask an admin to add that share (kind virtiofs)",
        )  # fmt: skip
    if guest[DISK]:
        yield Refusal("OSv cannot write a user's disk", key=DISK.key, value=guest[DISK])
    if mode == "rest" and not site[Settings].rest:
        yield Refusal(
            "OSv's REST server has no authentication, and this site has disabled it",
            key="osv_mode", value=mode, where="[plugin.osv] rest = false",
            fix="leave osv_mode out",
        )  # fmt: skip
    if mode == "rest" and not check.has(image, check.REST):
        yield Refusal(
            f"image {image.name} has no REST server", key="osv_mode", value=mode,
            fix="leave osv_mode out, or choose an image with the label rest=true",
        )  # fmt: skip


vtorque_resources = hookimpl(deferred("vtorque_osv.bootline:resources"))
