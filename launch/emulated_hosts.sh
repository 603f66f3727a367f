#!/usr/bin/env bash
# Compare the model of scaling with ranks on hosts that network namespaces emulate on this machine.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() {
    cat <<'TEXT'
usage: launch/emulated_hosts.sh [--shapes "2x1 4x1 2x2 4x2"] [--networks "200mbit,1000 100mbit,3000"]
                                [-- ARGUMENTS]

Measures our strategies and the baselines on hosts of network namespaces, for each shape (hosts x
ranks of a host) and network (rate of a host's port, microseconds between hosts), and compares with
the model: the same order of systems, and medians within 20% where each rank has a core. Takes root
or user namespaces, ip and tc, and about 8 minutes on an otherwise idle machine. Rows go to
scaling_runs/results/emulated_*.csv. ARGUMENTS go to scaling_runs/namespaces.py.
TEXT
}

shapes="2x1 4x1 2x2 4x2" networks="200mbit,1000 100mbit,3000"
while [ $# -gt 0 ]; do
    case "$1" in
        --help | -h) usage; exit 0 ;;
        --shapes | --networks)
            [ $# -ge 2 ] || { echo "$1 wants a value" >&2; exit 2; }
            declare "${1#--}=$2"; shift 2 ;;
        --) shift; break ;;
        *) usage >&2; exit 2 ;;
    esac
done
./launch/setup.sh
status=0
for network in $networks; do
    for shape in $shapes; do
        .venv/bin/python scaling_runs/namespaces.py --hosts "${shape%x*}" --ranks-per-host "${shape#*x}" \
            --rate "${network%,*}" --latency-us "${network#*,}" "$@" || status=$?
        [ "$status" -ne 2 ] || exit 2 # refused: no other shape is allowed either
    done
done
.venv/bin/python -m scaling_runs.model --validate --host cpu || status=$?
exit "$status"
