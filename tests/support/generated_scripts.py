"""Job scripts of workflow tools (tests/data/generated_scripts), and their expected results.

The tools themselves are not installed. A stub replaces their worker, and prints its name, the
kernel and its arguments. Stubs of PSI/J's launchers redirect output and run the rest of their
command line.
"""

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

DATA = Path(__file__).parents[1] / "data/generated_scripts"
DIRECTORIES = (
    "bin", "logs", "venv/bin", "parsl/scripts", "psij", "smk/.snakemake/slurm_logs/rule_a",
    *(f".psij/work/{executor}" for executor in ("pbs", "pbs_classic", "slurm")),
    "work/3f/9ac1d2",
)  # fmt: skip
WORKER = '#!/bin/sh\necho "worker ${0##*/} $(uname -r) $*"\n'
WORKERS = ("bin/python3", "bin/process_worker_pool.py", "venv/bin/python3")
# Arguments: job, four of the tool's own, standard input, output, error; of two the number of tasks.
SINGLE_LAUNCH = 'shift 4; in=$1 out=$2 err=$3; shift 3\n"$@" >$out 2>$err <$in\n'
MULTI_LAUNCH = SINGLE_LAUNCH.replace("shift 3", "shift 4")
LAUNCHERS = {
    "single_launch.sh": SINGLE_LAUNCH,
    "multi_launch.sh": MULTI_LAUNCH,
    "srun_launch.sh": MULTI_LAUNCH.replace('"$@"', 'srun "$@"'),
}
TASK = """#!/bin/bash -ue
cat reads.txt | tr -d '\\n' | wc -c > counts.txt
echo counted; uname -r >&2
"""

# The script of a job array of Nextflow (TaskArrayCollector.groovy), and an output of its task.
NEXTFLOW_ARRAY = """array=( {directories} )
export nxf_array_task_dir=${{array[{index}]}}
touch counts.txt
bash $nxf_array_task_dir/.command.run 2>&1 > $nxf_array_task_dir/.command.log"""


@dataclass(frozen=True)
class Generated:
    """A generated job script.

    ``wanted``: file below the home to its expected content; ``{job}`` stands for the job's id.
    """

    name: str
    wanted: dict[str, str]
    short: bool = False

    def content(self, home):
        """Return the script for a user of this home directory."""
        return (DATA / self.name).read_text().replace("@HOME@", str(home))

    def later_directories(self, job):
        """Return the directories that the tool makes once the job's id is known."""
        found = {
            name.format(job=job).rpartition("/")[0] for name in self.wanted if "{job}/" in name
        }
        return found | {f"log_test/{job}_{n}" for n in range(3) if "array" in self.name}

    def arguments(self, home):
        """Return the submission's arguments if there is no script."""
        return json.loads(self.content(home))


DASK = (
    r"^worker python3 {kernel} -m distributed.cli.dask_worker tcp://192.0.2.2:40001 --name \w+-0 "
)
POOL = r"worker process_worker_pool.py {kernel} --debug --max_workers_per_node=1 .*/000$"
SNAKEMAKE = r"^worker python3 {kernel} -m snakemake --snakefile \S+/smk/Snakefile .*--mode remote$"
SUBMITIT = r"^worker python3 {kernel} -u -m submitit.core._submit \S+/log_test/%j$"
PSIJ = {"psij/psij.out": r"^hello it's \$HOME$"}
NEXTFLOW = {
    "work/3f/9ac1d2/.exitcode": "^0$",
    "work/3f/9ac1d2/counts.txt": "^4$",
    "work/3f/9ac1d2/.command.log": r"^started \d{{13}}$(?s:.*)^{kernel}$",
}

POOL_ALONE = f"(?s)Launching worker: 1.*{POOL}"
PBS = (
    Generated("dask-pbs.sh", {"logs/dask-worker.o*": DASK}),
    Generated("nextflow-pbs.sh", NEXTFLOW, short=True),
    Generated("parsl-torque.sh", {"parsl/scripts/*.stdout": POOL_ALONE}),
    Generated("parsl-pbspro.sh", {"parsl/scripts/*.stdout": f"^{POOL}"}),
    Generated("psij-torque.sh", PSIJ | {".psij/work/pbs_classic/{job}.ec": "^0$"}),
    Generated("psij-pbspro.sh", PSIJ | {".psij/work/pbs/{job}.ec": "^0$"}),
    Generated("snakemake-pbs.sh", {"snakemake-pbs.sh.o*": SNAKEMAKE}),
)
POOL_BY_SRUN = f"(?s)Found nodes : 1$.*^0: {POOL}.*^Done$"
SNAKEMAKE_STEP = SNAKEMAKE.replace("--mode", "--jobs 1 --mode")
SLURM = (
    Generated("dask-slurm.sh", {"logs/dask-worker-{job}.out": DASK}),
    Generated("nextflow-slurm.sh", NEXTFLOW, short=True),
    Generated("parsl-slurm-srun.sh", {"parsl/scripts/*.stdout": POOL_BY_SRUN}),
    Generated("parsl-slurm-single.sh", {"parsl/scripts/*.stdout": POOL_ALONE}),
    Generated("psij-slurm-single.sh", PSIJ | {".psij/work/slurm/{job}.ec": "^0$"}),
    Generated(
        "psij-slurm-multiple.sh",
        PSIJ | {".psij/work/slurm/{job}.nodefile": r"^vn\d\n$"},
    ),
    Generated("psij-slurm-srun.sh", PSIJ | {".psij/work/slurm/{job}.ec": "^0$"}),
    Generated(
        "snakemake-slurm.json",
        {"smk/.snakemake/slurm_logs/rule_a/{job}.log": SNAKEMAKE_STEP},
    ),
    Generated(
        "submitit-array.sh",
        {f"log_test/{{job}}_{n}/{{job}}_{n}_0_log.out": SUBMITIT for n in range(3)},
    ),
    Generated("submitit.sh", {"log_test/{job}/{job}_0_log.out": SUBMITIT}),
)


def prepare(home, script):
    """Create the tool's files in the home as at the submission; return the files."""
    for name in DIRECTORIES:
        (home / name).mkdir(parents=True, exist_ok=True)
    files = dict.fromkeys(WORKERS, WORKER)
    files |= {"reads.txt": "ACGT\n", "work/3f/9ac1d2/.command.sh": TASK}
    for path in re.findall(rf"{home}/(\.psij/\S+)/(\w+_launch\.sh)", script):
        files["/".join(path)] = LAUNCHERS[path[1]]
    for name, content in files.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(content)
        (home / name).chmod(0o755)


def check(home, generated, job, *, kernel=r"(?!{host})\S+"):
    """Fail unless every file that the job has to write exists and has the expected text."""
    kernel = kernel.format(host=re.escape(os.uname().release))
    for name, pattern in generated.wanted.items():
        (path,) = home.glob(name.format(job=job))
        wanted = pattern.format(job=job, kernel=kernel)
        assert re.search(wanted, path.read_text(), re.MULTILINE), (name, path.read_text(), wanted)
