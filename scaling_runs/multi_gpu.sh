#!/usr/bin/env bash
# Measure everything that several GPUs of one host can tell; see scaling_runs/README.md.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Multicast over NVLink can disable a shared host: it stays off.
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" PYTHONUNBUFFERED=1

python=.venv/bin/python
[ -x "$python" ] || python=python3
exec "$python" scaling_runs/multi_gpu.py "$@"
