#!/usr/bin/env bash
# MPICH 5.0.2 ends a job whose standard input has more data than a pipe holds (64 KiB), if rank 0 does not read it
# fast enough: "process reading stdin too slowly; can't keep up". A program that computes for a moment before it
# reads its input from a pipe or a file fails with 100 kB and works with 10 kB.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q mpich==5.0.2
mpiexec=$folder/venv/bin/mpiexec
"$mpiexec" --version | grep Version

# Counts the bytes of standard input in rank 0, which begins to read after a second; $1 bytes are sent.
count() {
    head -c "$1" /dev/zero >"$folder/input"
    timeout 60 "$mpiexec" -n 1 sh -c 'sleep 1; wc -c' <"$folder/input" 2>"$folder/errors"
}

counted=$(count 10000)
echo "10000 bytes: $counted counted"
[ "$counted" = 10000 ]
status=0
count 100000 || status=$?
echo "100000 bytes: status $status"
cat "$folder/errors"
[ "$status" -ne 0 ]
[ "$status" -ne 124 ]
grep -q "process reading stdin too slowly" "$folder/errors"
