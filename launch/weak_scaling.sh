#!/usr/bin/env bash
# Measure weak and strong scaling on this machine, or on several: run this on each of them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() {
    cat <<'TEXT'
usage: launch/weak_scaling.sh [--ranks N] [--nodes N --head HOST[:PORT]] [--] ARGUMENTS

Starts N processes of scaling_runs/weak_scaling.py a node: the number of GPUs, or 2 without one.
With --nodes, run the same line on every node; they meet at HOST, one of them (port 29400).
All arguments of the program: .venv/bin/python scaling_runs/weak_scaling.py --help

  launch/weak_scaling.sh --ranks 2 -- --config configs/weak_scaling/cpu.yaml
  launch/weak_scaling.sh -- --config configs/weak_scaling/8_gpus.yaml
  launch/weak_scaling.sh --nodes 2 --head node0 -- --config configs/weak_scaling/16_gpus.yaml
TEXT
}

ranks="" nodes="" head=""
while [ $# -gt 0 ]; do
    case "$1" in
        --help | -h) usage; exit 0 ;;
        --ranks | --nodes | --head)
            [ $# -ge 2 ] || { echo "$1 wants a value" >&2; exit 2; }
            declare "${1#--}=$2"; shift 2 ;;
        --) shift; break ;;
        *) break ;;
    esac
done
if [ -n "$nodes$head" ] && { [ -z "$nodes" ] || [ -z "$head" ]; }; then
    echo "--nodes and --head are given together" >&2
    exit 2
fi
./launch/setup.sh
if [ -z "$ranks" ]; then
    ranks="$(.venv/bin/python -c 'import torch; print(torch.cuda.device_count() or 2)')"
fi
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
.venv/bin/python scaling_runs/weak_scaling.py --list "$@" > /dev/null
meeting=(--standalone)
if [ -n "$nodes" ]; then
    case "$head" in *:*) ;; *) head="$head:29400" ;; esac
    meeting=(--nnodes="$nodes" --rdzv_id=weak_scaling --rdzv_backend=c10d --rdzv_endpoint="$head")
fi
exec .venv/bin/torchrun "${meeting[@]}" --nproc_per_node="$ranks" scaling_runs/weak_scaling.py "$@"
