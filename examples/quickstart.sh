#!/usr/bin/env bash
# From a fresh clone to a trained translation model, scored, with pictures of its positions:
#
#   bash examples/quickstart.sh [options]          (--help lists them)
#
# Installs into .venv first; the first time that takes minutes, later a second.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
bash "$root/scripts/install.sh"
exec "$root/.venv/bin/python" "$root/scripts/quickstart.py" "$@"
