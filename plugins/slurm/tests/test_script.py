"""#SBATCH lines, and those of PBS and LSF."""

from vtorque_slurm import script


def test_sbatch_lines_of_a_script_are_found():
    content = (
        b"#!/bin/bash\n# note\n\n#SBATCH --comment='a b' -N 2 # not --mem=1\n #SBATCH -n9\n"
        b'#SBATCH\t-J "x\\"y"\n##SBATCH -t1\n#SBATCHX -t2\n#SBATCH --what\necho\n#SBATCH -t3\n'
    )
    assert script.components(content)[0].options == (
        ("comment", "a b"), ("nodes", "2"), ("job-name", 'x"y'),
    )  # fmt: skip


def test_pbs_and_lsf_lines_are_found():
    content = b"#!/bin/sh\n#PBS -N x -l nodes=1,walltime=1:00\n#BSUB -M 5\n:\n#PBS -l mem=1gb\n"
    assert script.options_of_dialects(content) == {"job-name", "time", "mem"}
    assert script.options_of_dialects(b"#!/bin/sh\n#PBS -l nodes=1:ppn=2\n") == frozenset()
