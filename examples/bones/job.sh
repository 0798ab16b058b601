#!/bin/bash
#PBS -N bones -j oe -t 1-4
#SBATCH -J bones -a 1-4
#VSUB -vm img=bones,vcpus=1,ram=512M
# A task each specimen: its number is the seed of its structure. Submit from this directory.
set -e
cd "${PBS_O_WORKDIR:-.}"  # PBS starts jobs in the home
specimen=${PBS_ARRAYID:-${PBS_ARRAY_INDEX:-${SLURM_ARRAY_TASK_ID:-1}}}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 bone.py mesh "$specimen" > "$work/bone.inp"
(cd "$work" && OMP_NUM_THREADS=$(nproc) ccx bone > ccx.log) || { cat "$work/ccx.log"; exit 1; }
python3 bone.py stiffness "$specimen" "$work/bone.dat"
