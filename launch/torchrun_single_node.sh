#!/usr/bin/env bash
# Start training on this machine, one process for each GPU or, without one, for each given rank.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() {
    cat <<'TEXT'
usage: launch/torchrun_single_node.sh [--ranks N] [--] TRAINING ARGUMENTS

Starts N processes of `flexla-dist train` with torchrun; N is the number of GPUs, or 2 without one.

  launch/torchrun_single_node.sh --ranks 2 -- --config configs/quickstart.yaml --mesh.cp 2
TEXT
}

ranks=""
while [ $# -gt 0 ]; do
    case "$1" in
        --help | -h) usage; exit 0 ;;
        --ranks)
            [ $# -ge 2 ] || { echo "--ranks wants a number" >&2; exit 2; }
            ranks="$2"; shift 2 ;;
        --) shift; break ;;
        *) break ;;
    esac
done
./launch/setup.sh
if [ -z "$ranks" ]; then
    ranks="$(.venv/bin/python -c 'import torch; print(torch.cuda.device_count() or 2)')"
fi
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
.venv/bin/python -m flexla_dist.train --check_settings="$ranks" "$@" || {
    status=$? # 3: --help was answered
    exit $((status == 3 ? 0 : status))
}
exec .venv/bin/torchrun --standalone --nproc_per_node="$ranks" -m flexla_dist.train "$@"
