#!/usr/bin/env bash
# From a fresh clone to a trained translation model, scored, with pictures of its positions:
#
#   bash examples/quickstart.sh [options]          (--help lists them)
#
# Installs into .venv first; the first time that takes minutes, later a second. A copy of `relpos recipes`
# runs what is installed.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
python=$root/.venv/bin/python
[ -e "$root/scripts/install.sh" ] || [ -e "$root/relpos_fairseq" ] || exec python -m relpos_fairseq.cli quickstart "$@"
case " $* " in
  *" --help "* | *" -h "*) [ -x "$python" ] || python=python3 ;;  # any Python can say it
  *) bash "$root/scripts/install.sh" ;;
esac
exec env PYTHONPATH="$root" "$python" -m relpos_fairseq.cli quickstart "$@"
