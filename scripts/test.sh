#!/usr/bin/env bash
# Installs what the tests need and runs them.
#
#   bash scripts/test.sh [pytest arguments]
#
# Without a path all of tests/ runs (testpaths in pyproject.toml); paths count from the repository
# root: bash scripts/test.sh tests/test_schemes.py -k m4 -m "not slow"
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
bash "$root/scripts/install.sh" --test
cd "$root"

# The tests' tensors are small: more threads than this cost time, and one process a core (-n) none.
if [ -z "${OMP_NUM_THREADS:-}" ]; then
  case " $* " in
    *" -n"* | *" --numprocesses"*) OMP_NUM_THREADS=1 ;;
    *)
      cores=$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2)
      OMP_NUM_THREADS=$((cores < 4 ? cores : 4))
      ;;
  esac
  export OMP_NUM_THREADS
fi
exec "$root/.venv/bin/python" -m pytest "$@"
