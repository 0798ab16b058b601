#!/bin/bash
#PBS -N halo -j oe -l nodes=2:ppn=2
#SBATCH -J halo -N 2 -n 4
#VSUB -vm img=mpi-halo,vms_per_node=2,vcpus=1,ram=768M
# The program lies beside this script: submit from there.
set -e
cd "${PBS_O_WORKDIR:-.}"  # PBS starts jobs in the home
mpicc -O2 -o "halo.$$" halo.c -lm
trap 'rm -f "halo.$$"' EXIT
mpirun "./halo.$$" "${STEPS:-200}"
