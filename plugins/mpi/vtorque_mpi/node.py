"""Variables and host files with which ``mpirun`` finds a job's guests without options. No I/O.

The variables make each launcher ignore the host's batch variables, and start its daemons in the
guests by ssh, with the job's keys. Sources:

- Open MPI 4: mpirun(1), "Setting MCA Parameters" (``OMPI_MCA_<key>``), ``ompi_info --all`` for the
  keys, orte_hosts(7) for host files. Open MPI 5: PRRTE 3.0, prte_mca_params.c (``PRTE_MCA_<key>``);
  its mpirun uses ``OMPI_MCA_<key>`` if ``PRTE_MCA_<key>`` is unset (schizo_ompi.c).
- MPICH, MVAPICH: "Using the Hydra Process Manager", Environment Settings; mpiexec.hydra -rmk -help.
- Intel MPI: Developer Reference for Linux, Hydra Environment Variables, Global Hydra Options.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

from vtorque_core.api import hookimpl
from vtorque_core.api.guest_context import ContextItem, EnvVar, GuestFile
from vtorque_core.api.guest_plan import GuestPlan

DIRECTORY = "/etc/vtorque/mpi"

# Variables set here: for each, the user's variable with the same meaning, which takes precedence.
_OTHER_NAMES = {
    "PRTE_MCA_prte_default_hostfile": "OMPI_MCA_orte_default_hostfile",
    "PRTE_MCA_plm": "OMPI_MCA_plm",
    "PRTE_MCA_plm_ssh_agent": "OMPI_MCA_plm_rsh_agent",
    "PRTE_MCA_ras": "OMPI_MCA_ras",
    "HYDRA_LAUNCHER": "HYDRA_BOOTSTRAP",
}


@hookimpl
def vtorque_guest_context(guest: GuestPlan) -> Iterator[ContextItem]:
    """Yield host files and variables for mpirun, if the guest type supports files and variables."""
    if not {"GuestFile", "EnvVar"} <= guest.supports:
        return
    for name, text in _files(guest).items():
        yield GuestFile(f"{DIRECTORY}/{name}", text.encode())
    for name, value in _variables(guest).items():
        other = _OTHER_NAMES.get(name)
        yield EnvVar(name, value, unless=(name, other) if other else (name,))


def _files(guest: GuestPlan) -> dict[str, str]:
    places = [*zip(guest.hostnames, guest.slots, strict=True)]
    places += [(node.name, node.slots) for node in guest.bare]
    return {
        "openmpi": "".join(f"{name} slots={slots}\n" for name, slots in places),
        "hydra": "".join(f"{name}:{slots}\n" for name, slots in places),
        "intel": "".join(f"{name}\n" for name, _ in places),
    }


def _variables(guest: GuestPlan) -> dict[str, str]:
    found = {
        "OMPI_MCA_orte_default_hostfile": f"{DIRECTORY}/openmpi",
        "OMPI_MCA_plm": "rsh",
        "OMPI_MCA_plm_rsh_agent": "ssh",
        "OMPI_MCA_ras": "^slurm,tm,lsf,gridengine",
        "PRTE_MCA_prte_default_hostfile": f"{DIRECTORY}/openmpi",
        "PRTE_MCA_plm": "ssh",
        "PRTE_MCA_plm_ssh_agent": "ssh",
        "PRTE_MCA_ras": "^slurm,pbs,lsf,gridengine",
        "HYDRA_HOST_FILE": f"{DIRECTORY}/hydra",
        "HYDRA_LAUNCHER": "ssh",
        "HYDRA_RMK": "user",
        "I_MPI_HYDRA_BOOTSTRAP": "ssh",
        "I_MPI_HYDRA_HOST_FILE": f"{DIRECTORY}/intel",
        # Intel MPI's host file has no slots: the smallest guest limits the processes per guest. The
        # second variable makes Intel MPI respect the first under a batch system.
        "I_MPI_PERHOST": str(min(guest.slots, default=guest.vcpus)),
        "I_MPI_JOB_RESPECT_PROCESS_PLACEMENT": "off",
    }
    subnets = _subnets(guest)
    if subnets and not guest.bare:  # the networks of bare-metal nodes are unknown
        found["OMPI_MCA_oob_tcp_if_include"] = subnets[0]
        found["PRTE_MCA_prte_if_include"] = subnets[0]
        found["OMPI_MCA_btl_tcp_if_include"] = ",".join(subnets)
    return found


def _subnets(guest: GuestPlan) -> list[str]:
    """Return the subnets of NICs with known addresses; [] if the first NIC's address is unknown."""
    known = [f"{a.ip}/{a.prefix}" for a in guest.addresses if a.ip is not None]
    if not known or guest.addresses[0].ip is None:
        return []
    return [str(ipaddress.IPv4Interface(each).network) for each in known]
