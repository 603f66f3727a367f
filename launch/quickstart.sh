#!/usr/bin/env bash
# From a fresh clone to a trained model: set up, then train on two processes that share each sequence.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ "${1:-}" = --help ] || [ "${1:-}" = -h ]; then
    cat <<'TEXT'
usage: launch/quickstart.sh [--data PATH...] [SETTINGS]

Makes .venv, installs the package, and trains a small gated-delta-rule language model on the Python
sources of the standard library, for at most four minutes on two CPU cores. Two processes hold half of
every sequence each. Then it prints held-out bits per byte and a generated sample.

  --data PATH...    learn from these files and folders instead
  SETTINGS          any setting of configs/quickstart.yaml, for example --steps 100

All settings: .venv/bin/flexla-dist train --help
TEXT
    exit 0
fi

./launch/setup.sh
export OMP_NUM_THREADS=1
.venv/bin/python -m flexla_dist.train --check_settings="2" --config configs/quickstart.yaml "$@" || {
    status=$? # 3: --help was answered
    exit $((status == 3 ? 0 : status))
}
exec .venv/bin/torchrun --standalone --nproc_per_node=2 -m flexla_dist.train \
    --config configs/quickstart.yaml "$@"
