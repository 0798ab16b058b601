"""Record the console of a guest that a test starts without a job."""

from vtorque_core.api.guest_plan import GuestPlan
from vtorque_core.base import hypervisor
from vtorque_core.resources.console import ConsoleRecorder


def recorder(guest: GuestPlan) -> ConsoleRecorder:
    """Return the process to which the guest's QEMU connects."""
    uid = guest.qemu_uid or hypervisor.qemu_uid("libvirt-qemu")
    log, run = f"{guest.state_dir}/console.log", guest.run_dir
    return ConsoleRecorder((f"{run}/console.sock", log, str(uid)), f"{run}/console.lock")
