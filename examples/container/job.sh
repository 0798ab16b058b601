#!/bin/sh
#PBS -N waves -j oe -t 1-3
#SBATCH -J waves -a 1-3
#VSUB -vm img=stack,vcpus=1,ram=512M
# A task each size of the matrix. Submit from this directory, which gets the results.
cd "${PBS_O_WORKDIR:-.}"  # PBS starts jobs in the home
task=${PBS_ARRAYID:-${PBS_ARRAY_INDEX:-${SLURM_ARRAY_TASK_ID:-1}}}
python3 waves.py "$((task * 100))" > "result-$task.json" && cat "result-$task.json"
