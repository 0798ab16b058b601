#!/bin/bash
#PBS -N airflow -j oe -l nodes=2:ppn=1
#SBATCH -J airflow -N 2 -n 2
#VSUB -vm img=airflow,vcpus=1,ram=512M
# The case lies beside this script: submit from there. All ranks work in a copy of it.
set -e
cd "${PBS_O_WORKDIR:-.}"  # PBS starts jobs in the home
export WM_PROJECT_DIR=/usr/share/openfoam  # where Debian has OpenFOAM's etc/
run=$(mktemp -d "$PWD/run.XXXXXX")
trap 'rm -rf "$run"' EXIT
cp -r case/. "$run"
cd "$run"
(blockMesh && decomposePar && mpirun -x WM_PROJECT_DIR pisoFoam -parallel) > log || { tail -n 30 log; exit 1; }
drag=$(sed -n 's/^ *Cd  *: \([0-9.]*\).*/\1/p' log | tail -n 1)
took=$(sed -n 's/.*ClockTime = //p' log | tail -n 1)
echo "ranks on $(mpirun hostname | sort | xargs): drag $drag after $(grep -c ^ExecutionTime log) steps, $took"
