#!/usr/bin/env bash
# Installs what the tests need and runs them.
#
#   bash scripts/test.sh [--python VERSION] [--reach | --changed[=COMMIT]] [pytest arguments]
#
# Without a path all of tests/ runs (testpaths in pyproject.toml); paths count from the repository
# root: bash scripts/test.sh tests/schemes -k m4 -m "not slow"
# --python 3.12, before them, tests with that Python, in .venv-3.12.
# --reach, a third slower: record in .reach/ which tests enter which lines.  --changed, after it: the tests
# that reach what differs from the last commit, or from another one (tests/reach.py).
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
venv=$root/.venv version=()
case "${1:-}" in
  --python) version=("$@") version=("${version[@]:0:2}") venv=$root/.venv-${2:-} && shift "${#version[@]}" ;;
  --python=*) version=("$1") venv=$root/.venv-${1#--python=} && shift ;;
esac
reach=''
case "${1:-}" in --reach | --changed | --changed=*) reach=$1 && shift ;; esac
bash "$root/scripts/install.sh" --test ${version[@]+"${version[@]}"}
cd "$root"
case "$reach" in
  --reach) rm -rf .reach && export RELPOS_REACH=1 ;;
  --changed*)
    commit=${reach#--changed}
    "$venv/bin/python" tests/reach.py "${commit#=}"
    export RELPOS_CHANGED=$root/.reach/changed
    set -- "$@" @.reach/changed.files
    ;;
esac

# One process a core, each with one thread: the tests' tensors are too small for more.  What watches
# or steers a single process (-s, --pdb, -n itself) gets a single one.
cores=$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
spread=(-n "$cores" --dist loadfile --no-loadscope-reorder)  # the order of tests/conftest.py
if [ "$cores" -lt 2 ]; then spread=(); fi
for argument in "$@"; do
  case "$argument" in
    -n* | --numprocesses* | --dist* | -s | --capture=no | --pdb | --trace) spread=() ;;
  esac
done
unset PYTHONDONTWRITEBYTECODE  # each of some hundred commands would compile the package, and a worker the tests
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-passive}"
exec "$venv/bin/python" -m pytest ${spread[@]+"${spread[@]}"} "$@"
