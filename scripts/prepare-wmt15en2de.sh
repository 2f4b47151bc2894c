#!/usr/bin/env bash
# Downloads, cleans and binarises WMT 2015 English-German, under the name that fairseq's users expect:
#   bash scripts/prepare-wmt15en2de.sh [options of relpos prepare wmt: --workers 8, --dry-run, ...]
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
python=$root/.venv/bin/python
[ -x "$python" ] || python=python3
exec env PYTHONPATH="$root" "$python" -m relpos_fairseq.cli prepare wmt wmt15 en-de --yes "$@"
