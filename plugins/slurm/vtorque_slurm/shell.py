"""The job part: what slurmstepd starts the job shell with, and how it reaches the other nodes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from vtorque_core.api import UsageError
from vtorque_core.api.batch_system import JobShell, Started
from vtorque_slurm import inside_guests, request_channel

# Names and sockets of host nodes and host processes; CPU masks of the host.
_HOST_ONLY = """
SLURM_CONF SLURMD_NODENAME SLURMD_DEBUG SLURMD_TRES_BIND SLURM_TASK_PID SLURM_TOPOLOGY_ADDR
SLURM_TOPOLOGY_ADDR_PATTERN SLURM_NODE_ALIASES SLURM_PRIO_PROCESS SLURM_LAUNCH_NODE_IPADDR
SLURM_SRUN_COMM_HOST SLURM_SRUN_COMM_PORT SLURM_STEP_LAUNCHER_PORT SLURM_STEP_RESV_PORTS
SLURM_STEP_NODELIST SLURM_STEP_NUM_NODES SLURM_STEP_NUM_TASKS SLURM_STEP_TASKS_PER_NODE
SLURM_STEP_ID SLURM_STEPID SLURM_PTY_PORT SLURM_PTY_WIN_COL SLURM_PTY_WIN_ROW SLURM_CPU_BIND
SLURM_CPU_BIND_LIST SLURM_CPU_BIND_TYPE SLURM_CPU_BIND_VERBOSE SLURM_DISTRIBUTION
SLURM_WORKING_CLUSTER SLURM_UMASK SRUN_DEBUG SBATCH_CPU_BIND SBATCH_CPU_BIND_LIST
SBATCH_CPU_BIND_TYPE SBATCH_CPU_BIND_VERBOSE SBATCH_MEM_BIND SBATCH_MEM_BIND_LIST
SBATCH_MEM_BIND_TYPE SBATCH_MEM_BIND_VERBOSE SBATCH_MEM_BIND_PREFER SBATCH_MEM_BIND_SORT
SLURM_MEM_BIND SLURM_MEM_BIND_LIST SLURM_MEM_BIND_TYPE SLURM_JOB_GPUS SLURM_STEP_GPUS
"""


class SlurmJobShell(JobShell):
    """See :class:`vtorque_core.api.batch_system.JobShell`."""

    host_only = frozenset(_HOST_ONLY.split())
    login = False  # slurmstepd executes the script; it has the environment of the submission

    def started(
        self, argv: Sequence[str], environ: Mapping[str, str], stdin: int | None
    ) -> Started:
        """Return the job's id and script. Raises UsageError.

        A script's first line names the job shell, so the kernel gives its path and arguments
        (execve(2)); without one it is an interactive job, whose stdin is the terminal.
        """
        job_id = environ.get("SLURM_JOB_ID", "")
        if not job_id.isdecimal():
            raise UsageError("SLURM_JOB_ID is not set: this program is started by Slurm")
        if not argv and (stdin is None or not os.isatty(stdin)):
            raise UsageError("neither a script nor a terminal")
        if not argv and stdin is not None:
            _without_echo(stdin)
        return Started(job_id, Path(argv[0]) if argv else None, tuple(argv[1:]))

    def content(self, script: bytes) -> bytes:
        """Return the user's script: without what vsub put in front."""
        return request_channel.strip(script)

    def inside(self, environ: Mapping[str, str], guests: Mapping[str, str]) -> Mapping[str, str]:
        """Return the job's tasks, and memory per CPU, as they fit the guests."""
        return inside_guests.tasks(environ, guests)

    def on_every_node(
        self, command: Sequence[str], environ: Mapping[str, str], nodes: Sequence[str] = ()
    ) -> list[str]:
        """Return the command as a step beside all others, one task per node: srun(1).

        Of a heterogeneous job a step has the first component only, which has the guests. Every
        option that the environment would set otherwise is given.
        """
        count = environ.get("SLURM_JOB_NUM_NODES", "1")
        each = ("--ntasks-per-node=1", "--overlap", "--kill-on-bad-exit=1", "--mpi=none")
        quiet = ("--input=none", "--export=ALL")
        return ["srun", f"--nodes={count}", f"--ntasks={count}", *each, *quiet, *command]


def _without_echo(terminal: int) -> None:
    """Do not echo what is typed before the guest is ready: the guest's own terminal echoes it.

    The terminal is slurmstepd's, for this job alone.
    """
    import termios  # noqa: PLC0415 - interactive jobs only

    with contextlib.suppress(termios.error):
        settings = termios.tcgetattr(terminal)
        settings[3] &= ~termios.ECHO
        termios.tcsetattr(terminal, termios.TCSANOW, settings)
