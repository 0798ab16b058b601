#!/bin/bash



#PBS -V

#PBS -l select=1:ncpus=1:mpiprocs=1
#PBS -l place=scatter:shared

#PBS -l walltime=0:5:0




#PBS -e /dev/null
#PBS -o /dev/null

#PBS -V

export GREETING='a b'

PSIJ_NODEFILE="$PBS_NODEFILE"
export PSIJ_NODEFILE


cd "@HOME@/psij"

exec &>> "@HOME@/.psij/work/pbs/$PBS_JOBID.out"

/bin/bash @HOME@/.psij/work/f65b111560da52a6d41f52a732be0faf4914eb6d7af2230a8de326017979e684/single_launch.sh 4c6d3eae-98ee-4e9e-84d5-656ae9874cfb '' '' '' /dev/null psij.out psij.err /bin/echo hello 'it'"'"'s $HOME' 

echo "$?" > "@HOME@/.psij/work/pbs/$PBS_JOBID.ec"
