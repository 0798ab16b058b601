#!/bin/bash



#PBS -V

#PBS -l nodes=1:ppn=1

#PBS -l walltime=0:5:0




#PBS -e /dev/null
#PBS -o /dev/null

#PBS -V

export GREETING='a b'

PSIJ_NODEFILE="$PBS_NODEFILE"
export PSIJ_NODEFILE


cd "@HOME@/psij"

exec &>> "@HOME@/.psij/work/pbs_classic/$PBS_JOBID.out"

/bin/bash @HOME@/.psij/work/f65b111560da52a6d41f52a732be0faf4914eb6d7af2230a8de326017979e684/single_launch.sh ffeea4e0-1305-4abd-bf42-c1cc9878a794 '' '' '' /dev/null psij.out psij.err /bin/echo hello 'it'"'"'s $HOME' 

echo "$?" > "@HOME@/.psij/work/pbs_classic/$PBS_JOBID.ec"
