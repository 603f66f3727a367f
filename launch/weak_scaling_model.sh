#!/usr/bin/env bash
# Compare the model of scaling with real CPU processes on this machine.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() {
    cat <<'TEXT'
usage: launch/weak_scaling_model.sh [--ranks "2 4 8"] [--crowded N] [-- ARGUMENTS]

Measures configs/weak_scaling/model_check.yaml on each number of CPU processes, then on N of them (more
than there are cores: twice as many unless given) for the order of systems, then compares: medians
within 20% where each rank has a core, the same order beyond. Wants an otherwise idle machine; a few
minutes. Predictions are refused until this has passed. ARGUMENTS go to weak_scaling.py.
TEXT
}

cores="$(env -u OMP_NUM_THREADS nproc)"
ranks="" crowded=$((2 * cores))
while [ $# -gt 0 ]; do
    case "$1" in
        --help | -h) usage; exit 0 ;;
        --ranks | --crowded)
            [ $# -ge 2 ] || { echo "$1 wants a value" >&2; exit 2; }
            declare "${1#--}=$2"; shift 2 ;;
        --) shift; break ;;
        *) usage >&2; exit 2 ;;
    esac
done
if [ -z "$ranks" ]; then
    for count in 2 4 8; do
        [ "$count" -gt "$cores" ] || ranks="$ranks $count"
    done
fi
./launch/setup.sh
export OMP_NUM_THREADS=1
systems=chain,log_scan,all_gather,lasp2,lasp2_naive,lasp,zeco,ideal_same_plan,ideal_best
measure() { # a number of processes, and options
    local count="$1" some="$systems"
    shift
    # Ulysses wants a head for each rank; the calls have eight.
    [ $((8 % count)) -ne 0 ] || some="$some,ulysses"
    .venv/bin/torchrun --standalone --nproc_per_node="$count" scaling_runs/weak_scaling.py --device cpu \
        --config configs/weak_scaling/model_check.yaml --ranks "$count" --systems "$some" "$@"
}
for count in $ranks; do
    measure "$count" "$@"
done
measure "$crowded" --variants simple_gla --rounds 2 "$@"
for count in 2 8; do
    .venv/bin/torchrun --standalone --nproc_per_node="$count" -m scaling_runs.model --paced --seconds 1 ||
        echo "paced runs on $count ranks differ from the model by more than 20%" >&2
done
.venv/bin/python -m scaling_runs.model --validate --host cpu
