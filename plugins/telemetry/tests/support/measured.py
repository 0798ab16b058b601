"""Libvirt's counters of guests, recorded from a real one."""

from pathlib import Path

# virsh domstats of a guest of one vCPU and one iothread (libvirt 9.0, QEMU 7.2), and its NIC's.
DOMSTATS = Path(__file__).with_name("domstats.txt").read_text()
PAIRS = (line.split("=") for line in DOMSTATS.split())
COUNTERS = {key: int(value) if value.isdigit() else value for key, value in PAIRS}
GROWS = [
    key
    for key in COUNTERS
    if key.endswith((".bytes", ".time", ".reqs", ".pkts", ".times", ".delay"))
]


def domstats(more=0):
    """Return the recorded counters in libvirt-python's form, ``more`` added to each counter."""
    return {**COUNTERS, **{key: COUNTERS[key] + more for key in GROWS}}
