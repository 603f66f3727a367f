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

  --extra EXTRA     train: what training needs (default); dev: that, the tools of the tests, and, for
                    root on Debian and Ubuntu, OpenSHMEM for some of the tests and iproute2 for
                    emulated hosts (apt-get: Open MPI, ip and tc)
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

has_oshrun() {
    command -v oshrun >/dev/null 2>&1 && command -v oshcc >/dev/null 2>&1
}

apt_install() {
    DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "$@" </dev/null
}

install_openshmem() { # Debian's Open MPI and shmem4py, for tests; without them these are skipped
    local log=.venv/openshmem.log packages=(openmpi-bin libopenmpi-dev)
    if ! has_oshrun; then
        if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null 2>&1; then
            echo "there is no oshrun, and installing it takes root and apt-get"
            return 1
        fi
        echo "installing ${packages[*]} with apt-get, for tests of OpenSHMEM"
        { apt_install "${packages[@]}" || { apt-get update -qq && apt_install "${packages[@]}"; }; } \
            >"$log" 2>&1 || { echo "apt-get failed; $log says why"; return 1; }
    fi
    # The module only wraps calls: compiled without optimisation it is ready in a fifth of the time.
    CFLAGS=-O0 OSHCC=oshcc .venv/bin/python -m pip install -qq --disable-pip-version-check \
        --constraint .venv/constraints.txt --no-build-isolation --no-deps shmem4py >"$log" 2>&1 ||
        { echo "shmem4py could not be built; $log says why"; return 1; }
}

has_iproute2() { # the system's folders count, although a user's PATH may not have them
    local PATH="$PATH:/usr/sbin:/sbin"
    command -v ip >/dev/null 2>&1 && command -v tc >/dev/null 2>&1
}

install_iproute2() { # ip and tc, for hosts emulated by network namespaces
    local log=.venv/iproute2.log
    if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null 2>&1; then
        echo "there are no ip and tc, and installing iproute2 takes root and apt-get"
        return 1
    fi
    echo "installing iproute2 with apt-get, for emulated hosts"
    { apt_install iproute2 || { apt-get update -qq && apt_install iproute2; }; } >"$log" 2>&1 ||
        { echo "apt-get failed; $log says why"; return 1; }
}

[ -x .venv/bin/python ] || make_environment
stamp=".venv/installed-$extra"
openshmem_stamp=.venv/installed-openshmem no_openshmem_stamp=.venv/no-openshmem
wanted="$({ cat pyproject.toml constraints.txt; .venv/bin/python --version; } | sha256sum | cut -d' ' -f1)"

is_done() { # a stamp: was it made for these versions?
    [ -f "$1" ] && [ "$(cat "$1")" = "$wanted" ]
}

if ! is_done "$stamp" && ! is_done .venv/installed-dev; then
    write_constraints > .venv/constraints.txt
    echo "installing flexla_dist[$extra] into .venv: PyTorch and the rest, about a minute the first time"
    .venv/bin/python -m pip install -qq --disable-pip-version-check --constraint .venv/constraints.txt \
        --editable ".[$extra]" || fail "the installation failed; its messages are above"
    echo "$wanted" > "$stamp"
fi
if [ "$extra" = dev ] && ! is_done "$no_openshmem_stamp" &&
    ! { is_done "$openshmem_stamp" && has_oshrun; }; then
    if install_openshmem; then
        echo "$wanted" > "$openshmem_stamp"
    else
        echo "tests of OpenSHMEM will be skipped; to try again, remove $no_openshmem_stamp"
        echo "$wanted" > "$no_openshmem_stamp"
    fi
fi
no_iproute2_stamp=.venv/no-iproute2
if [ "$extra" = dev ] && ! has_iproute2 && ! is_done "$no_iproute2_stamp"; then
    if ! install_iproute2; then
        echo "tests of emulated hosts will be skipped; to try again, remove $no_iproute2_stamp"
        echo "$wanted" > "$no_iproute2_stamp"
    fi
fi
