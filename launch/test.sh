#!/usr/bin/env bash
# Set up, then check formatting, lint, types, and run the tests.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ "${1:-}" = --help ] || [ "${1:-}" = -h ]; then
    cat <<'TEXT'
usage: launch/test.sh [PYTEST ARGUMENTS]

Makes .venv where it is missing, checks formatting, lint and types, and runs the tests.
Arguments go to pytest:

  launch/test.sh                         everything but the larger grids
  launch/test.sh --long                  those too
  launch/test.sh tests/unit -k spec      some of them
TEXT
    exit 0
fi

./launch/setup.sh --extra dev
export OMP_NUM_THREADS=1

step() {
    local start=$SECONDS
    echo "== $1"
    shift
    "$@"
    echo "   $((SECONDS - start)) s"
}

step "formatting" .venv/bin/ruff format --check --quiet .
step "lint" .venv/bin/ruff check --quiet .
step "types" .venv/bin/mypy
step "tests" .venv/bin/python -m pytest "$@"
