#!/usr/bin/env bash
# Set up, then check formatting, lint, types, and run the tests.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

if [ "${1:-}" = --help ] || [ "${1:-}" = -h ]; then
    cat <<'TEXT'
usage: launch/test.sh [PYTEST ARGUMENTS]

Makes .venv where it is missing, checks formatting, lint and types, and runs the tests.
In a git checkout, formatting, lint and types look at the files that git knows. Arguments go to pytest,
which runs twice, in Triton's interpreter (tests/interpret; its switch is read once in a process) and
outside it, each in as many processes as there are cores, at most four; single files in one. -n, -s and
--pdb change that.

  launch/test.sh                         everything but the larger grids
  launch/test.sh --long                  those too
  launch/test.sh tests/unit -k spec      some of them
  launch/test.sh tests/interpret         the interpreter's
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

sources=() typed=()
while IFS= read -r file; do
    [ -f "$file" ] || continue
    sources+=("$file")
    [[ $file != flexla_dist/* ]] || typed+=("$file")
done < <(git ls-files '*.py' 2>/dev/null)
[ ${#sources[@]} -gt 0 ] || sources=(.)

step "formatting" .venv/bin/ruff format --check --quiet --force-exclude "${sources[@]}"
step "lint" .venv/bin/ruff check --quiet --force-exclude "${sources[@]}"
step "types" .venv/bin/mypy ${typed[@]+"${typed[@]}"}
# Paths go to the run that they belong to, options to both. A run whose paths are not asked for is
# left out. Exit status 5 says that -k or -m left nothing of a run.
options=() compiled=() interpreted=()
for word in "$@"; do
    if [[ $word == tests || $word == tests/ ]]; then
        continue
    elif [[ $word == tests/interpret* ]]; then
        interpreted+=("$word")
    elif [ -e "${word%%::*}" ]; then
        compiled+=("$word")
    else
        options+=("$word")
    fi
done
if [ ${#compiled[@]} -eq 0 ] && [ ${#interpreted[@]} -eq 0 ]; then
    compiled=(tests) interpreted=(tests/interpret)
fi

# Processes beside each other: not for single files, which they would start up longer than they run,
# nor where the user says how many, or wants to see or to stop inside.
beside=()
processes="$(env -u OMP_NUM_THREADS nproc)"
[ "$processes" -le 4 ] || processes=4
if [ "$processes" -gt 1 ]; then
    beside=(-n "$processes" --dist loadfile)
fi
for word in ${compiled[@]+"${compiled[@]}"} ${interpreted[@]+"${interpreted[@]}"}; do
    [ ! -f "${word%%::*}" ] || beside=()
done
for word in ${options[@]+"${options[@]}"}; do
    case "$word" in
        -n* | --numprocesses* | --dist* | -s | --capture=no | --pdb | --trace | no:xdist | -pno:xdist) beside=() ;;
    esac
done

pytest_run() {
    .venv/bin/python -m pytest ${beside[@]+"${beside[@]}"} "$@" || { local status=$?; [ $status -eq 5 ] || return $status; }
}

if [ ${#compiled[@]} -gt 0 ]; then
    step "tests" pytest_run --ignore tests/interpret ${options[@]+"${options[@]}"} "${compiled[@]}"
fi
if [ ${#interpreted[@]} -gt 0 ]; then
    export TRITON_INTERPRET=1
    step "tests in the interpreter" pytest_run ${options[@]+"${options[@]}"} "${interpreted[@]}"
fi
