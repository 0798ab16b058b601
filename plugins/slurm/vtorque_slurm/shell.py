"""Slurm adapter of the job shell: arguments from slurmstepd, and access to the other nodes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from vtorque_core.api import UsageError
from vtorque_core.api.batch_system import JobShell, ShellStart
from vtorque_slurm import inside_guests, request_channel, step_tasks

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
SLURM_SPANK_VTORQUE_REQUEST SLURM_SPANK__SLURM_SPANK_OPTION_vtorque_vm
VTORQUE_TASK VTORQUE_TASKS VTORQUE_TASK_PROGRAM
SLURM_MEM_BIND SLURM_MEM_BIND_LIST SLURM_MEM_BIND_TYPE SLURM_JOB_GPUS SLURM_STEP_GPUS
SLURM_MPI_TYPE PMI_FD PMI_JOBID PMI_RANK PMI_SIZE PMIX_NAMESPACE PMIX_RANK PMIX_SERVER_URI2
PMIX_SERVER_URI21 PMIX_SERVER_URI3 PMIX_SERVER_URI4 PMIX_SERVER_URI41
"""
# MPI programs find the server of the plugins pmi2 and pmix by these. It listens only locally.
_PMI = ("PMI_FD", "PMIX_NAMESPACE")


class SlurmJobShell(JobShell):
    """Implementation of :class:`vtorque_core.api.batch_system.JobShell` for Slurm."""

    host_only = frozenset(_HOST_ONLY.split())
    login = False  # slurmstepd runs the script with the environment of the submission

    def __init__(self) -> None:
        self._is_vsubs = True  # True if vsub has inserted lines into the script

    def read_start(
        self, argv: Sequence[str], environ: Mapping[str, str], stdin: int | None
    ) -> ShellStart:
        """Return the job's id and script.

        The script's first line names the job shell, so the kernel starts the job shell with the
        script's path and arguments (execve(2)). Without a script, stdin is the terminal of an
        interactive job. For a task of srun, the SPANK plugin starts the job shell instead of the
        program, and passes the program's name in a variable.
        """
        job_id = environ.get("SLURM_JOB_ID", "")
        if not job_id.isdecimal():
            raise UsageError("SLURM_JOB_ID is not set: only Slurm can start this program")
        if program := environ.get("VTORQUE_TASK_PROGRAM"):
            if environ.get("VTORQUE_TASK") == "batch":
                self._is_vsubs = False
                return ShellStart(job_id, Path(program), tuple(argv))
            if environ.get("SLURM_STEP_NUM_TASKS", "1") != "1" and any(map(environ.get, _PMI)):
                raise UsageError(
                    "srun --mpi= does not work with virtual machines. Start MPI programs with "
                    "mpirun in the job's script, and other tasks with srun --mpi=none"
                )
            if stdin is not None and os.isatty(stdin):
                _disable_echo(stdin)
            ids = environ.get("VTORQUE_TASKS", "0").split(",")
            return ShellStart(job_id, None, command=step_tasks.command((program, *argv), ids))
        if not argv and (stdin is None or not os.isatty(stdin)):
            raise UsageError("standard input is neither a script nor a terminal")
        if not argv and stdin is not None:
            _disable_echo(stdin)
        return ShellStart(job_id, Path(argv[0]) if argv else None, tuple(argv[1:]))

    def content(self, script: bytes) -> bytes:
        """Return the user's script, without the lines that vsub inserted."""
        return request_channel.strip(script) if self._is_vsubs else script

    def guest_env(self, environ: Mapping[str, str], guests: Mapping[str, str]) -> Mapping[str, str]:
        """Return Slurm's variables for tasks and memory per CPU, with the values for guests."""
        return inside_guests.tasks(environ, guests)

    def node_command(
        self, command: Sequence[str], environ: Mapping[str, str], nodes: Sequence[str] = ()
    ) -> list[str]:
        """Return an srun command that overlaps other steps and runs one task per node (srun(1)).

        In a heterogeneous job, the command runs only on the nodes of the first component, which has
        the guests. The command repeats srun's defaults as options, because SLURM_ variables would
        override the defaults.
        """
        count = environ.get("SLURM_JOB_NUM_NODES", "1")
        each = ("--ntasks-per-node=1", "--overlap", "--kill-on-bad-exit=1", "--mpi=none")
        quiet = ("--input=none", "--export=ALL")
        return ["srun", f"--nodes={count}", f"--ntasks={count}", *each, *quiet, *command]


def _disable_echo(terminal: int) -> None:
    """Disable the echo of the user's terminal. The guest's terminal echoes all input."""
    import termios  # noqa: PLC0415 - interactive jobs only

    with contextlib.suppress(termios.error):
        settings = termios.tcgetattr(terminal)
        settings[3] &= ~termios.ECHO
        termios.tcsetattr(terminal, termios.TCSANOW, settings)
