#!/bin/sh
#PBS -N compose -j oe
#SBATCH -J compose
#VSUB -vm img=./docker.qcow2,root=script,ram=2G,vcpus=2
# Load the containers, run the services of compose.yaml, and end when the client has ended. Submit
# from this directory, which gets the result.
set -eu
cd "${PBS_O_WORKDIR:-.}"  # PBS starts jobs in the home
for image in postgres client; do docker load --quiet --input $image.tar; done
docker compose --ansi never up --abort-on-container-exit --exit-code-from client
