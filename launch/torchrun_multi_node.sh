#!/usr/bin/env bash
# Start training on several machines: run this on each of them.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() {
    cat <<'TEXT'
usage: launch/torchrun_multi_node.sh --nodes N --head HOST[:PORT] [--ranks N] [--] TRAINING ARGUMENTS

Run the same line on every node. They meet at HOST, one of them; the port is 29400 unless given.
Each node starts --ranks processes: the number of its GPUs, or 1 without one.

  launch/torchrun_multi_node.sh --nodes 2 --head node0 -- --config configs/long.yaml --mesh.cp 16
TEXT
}

nodes="" head="" ranks=""
while [ $# -gt 0 ]; do
    case "$1" in
        --help | -h) usage; exit 0 ;;
        --nodes | --head | --ranks)
            [ $# -ge 2 ] || { echo "$1 wants a value" >&2; exit 2; }
            declare "${1#--}=$2"; shift 2 ;;
        --) shift; break ;;
        *) break ;;
    esac
done
if [ -z "$nodes" ] || [ -z "$head" ]; then
    usage >&2
    exit 2
fi
case "$head" in *:*) ;; *) head="$head:29400" ;; esac
./launch/setup.sh
if [ -z "$ranks" ]; then
    ranks="$(.venv/bin/python -c 'import torch; print(torch.cuda.device_count() or 1)')"
fi
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
.venv/bin/python -m flexla_dist.train --check_settings="$((nodes * ranks))" "$@" || {
    status=$? # 3: --help was answered
    exit $((status == 3 ? 0 : status))
}
exec .venv/bin/torchrun --nnodes="$nodes" --nproc_per_node="$ranks" --rdzv_id=flexla_dist \
    --rdzv_backend=c10d --rdzv_endpoint="$head" -m flexla_dist.train "$@"
