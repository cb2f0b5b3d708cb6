#!/bin/sh
# Takes the record of a machine with NVIDIA GPUs: tests, stress tests, the machine's parameters and
# the benchmarks, on all GPUs, on half of them, and so on down to two.
#
#   bench/record.sh FOLDER [SECONDS]
#
# Each step writes FOLDER/STEP.log, and its results beside it. A step that has passed is not
# repeated, and a benchmark goes on where it was cut off, so the script may be started again after
# SECONDS have ended it, until it says that nothing is left. Lines of the record are in
# FOLDER/*.jsonl.
#
# Environment variables:
#   IRIS   the program [default: iris beside this script, as in the folder dist/ that `cargo xtask
#          dist` makes; otherwise iris in that folder]
#   GPUS   number of GPUs to use [default: all]
#   TORCH  Python program that times PyTorch; it is called with a number of ranks and the file to
#          write, in the format of `iris bench --torch` [default: none]
set -u
usage() {
    [ $# -eq 0 ] || echo "record.sh: $1" >&2
    sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2
    exit 2
}
number() {
    case $2 in
        '' | *[!0-9]*) usage "$1 is $2: expected a number" ;;
    esac
}
case $#${1:-} in
    [12][!-]*) ;;
    *) usage ;;
esac
folder=$1
number SECONDS "${2:-86400}"
end=$(($(date +%s) + ${2:-86400}))
here=$(dirname "$0")
usual=$here/iris
[ -x "$usual" ] || usual=$here/../dist/iris
iris=${IRIS:-$usual}
[ -x "$iris" ] || usage "IRIS is $iris: expected a program"
gpus=${GPUS:-$(nvidia-smi --list-gpus | wc -l)}
number GPUS "$gpus"
[ "$gpus" -ge 2 ] || usage "GPUS is $gpus: expected at least 2"
mkdir -p "$folder/passed" || exit 2
# Without a GPU the programs skip everything, which would pass for done.
if ! "$iris" doctor --backend cuda --no-links >"$folder/doctor.log" 2>&1; then
    cat "$folder/doctor.log" >&2
    exit 1
fi
# The parameters that tune-N measures are for the record; choices are made with the built-in ones.
export IRIS_TUNING=off NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1
left=

# Runs a step, given by its name and its command, unless it has passed or the time is over.
step() {
    name=$1
    shift
    [ -e "$folder/passed/$name" ] && return
    seconds=$((end - $(date +%s)))
    if [ $seconds -le 0 ]; then
        left="$left $name"
        return
    fi
    begun=$(date +%s)
    timeout -k 10 $seconds "$@" >"$folder/$name.log" 2>&1
    code=$?
    echo "$name: exit code $code after $(($(date +%s) - begun)) s: $(tail -n 1 "$folder/$name.log")"
    if [ $code -eq 0 ]; then : >"$folder/passed/$name"; else left="$left $name"; fi
}

# Runs a benchmark on some ranks, which goes on where it was cut off.
measure() {
    name=$1 ranks=$2
    shift 2
    step "$name-$ranks" "$iris" bench --backend cuda --ranks "$ranks" --limit 86400 \
        --resume --json "$folder/$name-$ranks.jsonl" "$@"
}

ranks=$gpus
while [ "$ranks" -ge 2 ]; do
    step "test-$ranks" "$iris" test --backend cuda --level quick --ranks "$ranks"
    # With --only no waits are left out: that takes minutes of compiling, and is the last step.
    step "stress-$ranks" "$iris" stress --backend cuda --calls 600 --only '' --ranks "$ranks"
    step "tune-$ranks" env IRIS_TUNING="$folder/tuned-$ranks.toml" \
        "$iris" tune --backend cuda --ranks "$ranks"
    times=
    if [ -n "${TORCH:-}" ]; then
        times=$folder/torch-$ranks.json
        step "torch-$ranks" python3 "$TORCH" "$ranks" "$times"
        [ -e "$folder/passed/torch-$ranks" ] || times=
    fi
    measure bench "$ranks" --windows ${times:+--torch "$times"}
    measure decode "$ranks" --cases "$here/decode.toml"
    ranks=$((ranks / 2))
done
# Worlds of the test level, some of them of processes; then each wait left out in turn.
step processes "$iris" test --backend cuda --level quick
step waits "$iris" stress --backend cuda --waits --ranks "$gpus"
if [ -n "$left" ]; then
    echo "left:$left"
    exit 1
fi
echo "nothing is left"
