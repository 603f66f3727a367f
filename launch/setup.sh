#!/usr/bin/env bash
# Make .venv and install the package into it; does nothing when both are up to date.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() {
    cat <<'TEXT'
usage: launch/setup.sh [--extra train|dev] [--python PYTHON]

Makes .venv with Python 3.11 or newer and installs flexla_dist into it, editable, with the versions
of constraints.txt. On a machine with a GPU and a PyTorch that uses it, that PyTorch and its Triton
are kept. A second call with nothing changed returns at once.

  --extra EXTRA     train: what training needs (default); dev: that and the tools of the tests
  --python PYTHON   the interpreter to make .venv with (default: the newest python3 found)
TEXT
}

fail() {
    echo "launch/setup.sh: $*" >&2
    exit 1
}

extra=train
python=""
while [ $# -gt 0 ]; do
    case "$1" in
        --help | -h) usage; exit 0 ;;
        --extra) [ $# -ge 2 ] || fail "--extra wants a value: train or dev"; extra="$2"; shift 2 ;;
        --python) [ $# -ge 2 ] || fail "--python wants a path"; python="$2"; shift 2 ;;
        *) usage >&2; fail "unknown argument: $1" ;;
    esac
done
[ "$extra" = train ] || [ "$extra" = dev ] || fail "--extra is train or dev, got: $extra"

new_enough() {
    command -v "$1" >/dev/null 2>&1 &&
        "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

find_python() {
    local candidate
    for candidate in $python python3 python3.13 python3.12 python3.11; do
        if new_enough "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    fail "no Python 3.11 or newer was found; install one, or name it with --python"
}

has_gpu_torch() { # an interpreter: does it have a PyTorch that sees a GPU?
    command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi >/dev/null 2>&1 &&
        "$1" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' >/dev/null 2>&1
}

make_environment() {
    local base site=()
    base="$(find_python)"
    has_gpu_torch "$base" && site=(--system-site-packages)
    echo "making .venv with $("$base" --version)${site:+, keeping the installed PyTorch}"
    "$base" -m venv "${site[@]}" .venv ||
        fail "python -m venv failed; on Debian and Ubuntu it needs the package python3-venv"
}

write_constraints() { # the file of pins that fits this machine
    if has_gpu_torch .venv/bin/python; then
        grep -vE '^(torch|triton)\b' constraints.txt
        .venv/bin/python -c 'import torch; print(f"torch=={torch.__version__}")'
    else
        cat constraints.txt
    fi
}

[ -x .venv/bin/python ] || make_environment
stamp=".venv/installed-$extra"
wanted="$({ cat pyproject.toml constraints.txt; .venv/bin/python --version; } | sha256sum | cut -d' ' -f1)"
for installed in "$stamp" .venv/installed-dev; do
    if [ -f "$installed" ] && [ "$(cat "$installed")" = "$wanted" ]; then
        exit 0
    fi
done

write_constraints > .venv/constraints.txt
echo "installing flexla_dist[$extra] into .venv: PyTorch and the rest, about a minute the first time"
.venv/bin/python -m pip install -qq --disable-pip-version-check --constraint .venv/constraints.txt \
    --editable ".[$extra]" || fail "the installation failed; its messages are above"
echo "$wanted" > "$stamp"
