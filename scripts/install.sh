#!/usr/bin/env bash
# Makes .venv in the repository root and installs the tested versions into it.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: bash scripts/install.sh [--test] [--python VERSION]

Makes .venv in the repository root and installs scripts/requirements.txt, fairseq and this
repository (editable) into it; --test adds scripts/requirements-test.txt. --python 3.12 takes that
Python, and .venv-3.12 in place of .venv. What is done and unchanged is skipped; an interrupted run is
continued by running it again.

Needs Python 3.10 to 3.13 with pip and venv, and where fairseq comes without a ready-made wheel
(there is one for 3.12) gcc and g++; gcc also for attention's fastest kernel on CPUs, compiled here
where there is one. About 2 GB of disk with a CPU build of torch, more with a CUDA build.

environment variables:
  PYTHON            the interpreter to use (default: of those on PATH the first that is 3.11
                    or 3.12, else 3.13 or 3.10)
  XDG_CACHE_HOME    built fairseq wheels are kept in its relpos_fairseq/wheels, the attention kernel
                    in its relpos_fairseq (default: ~/.cache)
  RELPOS_CACHE      a folder for the kernel alone, which then comes first
  pip's own (PIP_INDEX_URL, PIP_FIND_LINKS, HTTPS_PROXY ...) are respected; with them a CPU build
                    of torch can be chosen where the default is a CUDA build
TEXT
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
wanted_version=
place() { venv=$root/$1 python=$venv/bin/python stamps=$venv/.stamps log=$venv/install.log; }
place .venv
fairseq="fairseq-fixed==0.12.3.1"

say() { printf '[install] %s\n' "$*"; }
die() { printf '[install] error: %s\n' "$*" >&2; exit 1; }
pip() { "$python" -m pip --no-input --disable-pip-version-check "$@"; }
version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true; }

find_python() {
  local candidate versions candidates=(python3 python3.11 python3.12 python3.13 python3.10 python)
  local wanted=('3.11 3.12' '3.13 3.10')  # the first that is of the former, else of the latter
  [ -z "$wanted_version" ] || candidates=("python$wanted_version" python3 python) wanted=("$wanted_version")
  [ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
  for versions in "${wanted[@]}"; do
    for candidate in "${candidates[@]}"; do
      case " $versions " in *" $(version_of "$candidate") "*) echo "$candidate"; return ;; esac
    done
  done
  die "no Python ${wanted_version:-3.10 to 3.13} among ${candidates[*]}; name one:" \
    "PYTHON=/path/to/python${wanted_version:-3.11}"
}

ensure_venv() {
  local base owner
  [ ! -e "$venv" ] || [ -e "$venv/pyvenv.cfg" ] || die "$venv is no virtual environment; move it away"
  owner=$(cat "$stamps/place" 2>/dev/null || true)
  if [ "$owner" != "$venv" ] && pip --version >/dev/null 2>&1; then  # one without pip is what a kill left of its making
    [ -n "$owner" ] || die "$venv is an environment that this script has not made; move it away"
    [ ! "$owner" -ef "$venv" ] || die "$venv leads to $owner, the environment of another checkout; remove the link"
  fi
  # Scripts in a virtual environment name its place: a moved repository needs a new one.
  if [ "$owner" != "$venv" ] || ! pip --version >/dev/null 2>&1; then
    base=$(find_python)
    say "making ${venv##*/} with $("$base" --version 2>&1)"
    "$base" -m venv --clear "$venv" ||
      die "could not make $venv; Debian and Ubuntu need the package python3-venv"
    mkdir -p "$stamps"
    printf '%s' "$venv" >"$stamps/place"
  fi
  case "$(version_of "$python")" in
    3.1[0-3]) ;;
    *) say "note: Python $(version_of "$python") is not tested; 3.10 to 3.13 are" ;;
  esac
}

# A stamp holds the step's inputs word for word: "unchanged" is equality, no hash tool is needed.
step() {  # NAME INPUTS DESCRIPTION COMMAND...
  local name=$1 inputs=$2 description=$3 start=$SECONDS status=0 again=0
  shift 3
  [ "$(cat "$stamps/$name" 2>/dev/null)" != "$inputs" ] || return 0
  [ ! -e "$stamps/$name.begun" ] || again=1  # killed: packages may be half-copied, copy all again
  touch "$stamps/$name.begun"
  printf '[install] %s ... ' "$description"
  printf '\n=== %s\n' "$description" >>"$log"
  PIP_IGNORE_INSTALLED=$again "$@" >>"$log" 2>&1 </dev/null || status=$?
  [ "$status" -ge 128 ] || rm -f "$stamps/$name.begun"
  if [ "$status" != 0 ]; then "${on_failure:-fail}"; return; fi
  printf '%s' "$inputs" >"$stamps/$name.new"
  mv "$stamps/$name.new" "$stamps/$name"
  printf '%d s\n' $((SECONDS - start))
}

fail() {
  local advice="mend what the lines above name"
  ! tail -n 60 "$log" | grep -qiE 'connection|timed out|name resolution|No matching dist' ||
    advice="check network, proxy and pip's index settings"
  ! tail -n 60 "$log" | grep -qi 'No space left' || advice="the disk is full: make room"
  printf 'failed\n[install] the last lines of %s:\n' "$log" >&2
  tail -n 20 "$log" | sed 's/^/    /' >&2
  die "$advice, then run the same command again; finished steps are kept (to start over, delete $venv)"
}

pins() {  # FILE; some of the versions have left Python 3.10 behind: there the newest ones up to them
  local exactly='=='
  [ "$(version_of "$python")" != 3.10 ] || exactly='<='
  sed -n "/^[A-Za-z0-9]/s/==/$exactly/p" "$root/scripts/$1"
}

choose_wheels() {  # TORCH; a built wheel fits one Python and one torch
  local tag
  tag=$("$python" -c 'import sys, sysconfig; print("cp%d%d-%s" % (*sys.version_info[:2],
    sysconfig.get_platform()))' | tr -c 'A-Za-z0-9_.\n-' _)
  wheels=${XDG_CACHE_HOME:-${HOME:-$venv}/.cache}/relpos_fairseq/wheels/$tag-$1
  # A wheel's code runs: one that another user may have put there, or in a folder above it, is not taken.
  mkdir -p "$wheels" 2>/dev/null && private "$wheels" || { wheels=$venv/wheels; mkdir -p "$wheels"; }
}

private() {  # FOLDER; by the rule of the kernel's cache
  "$python" -c 'import pathlib, runpy, sys
is_private, folder = runpy.run_path(sys.argv[1])["is_private"], pathlib.Path(sys.argv[2])
sys.exit(not all(map(is_private, [folder, *folder.iterdir()])))' "$root/relpos_fairseq/attention/cache.py" "$1"
}

wheel() { find "$wheels" -maxdepth 1 -name "fairseq_fixed-${fairseq#*==}-*.whl" 2>/dev/null | head -n 1; }

check_compiler() {  # needed where no wheel is published (one is for 3.12 on Linux) or kept
  case "$(version_of "$python")-$(uname -sm)" in "3.12-Linux x86_64") return ;; esac
  [ ! -e "$stamps/fairseq" ] && [ -z "$(wheel)" ] || return 0
  command -v gcc >/dev/null && command -v g++ >/dev/null ||
    die "fairseq must be compiled, and gcc or g++ is missing (Debian, Ubuntu: build-essential)"
  [ -f "$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" ] ||
    die "fairseq must be compiled, and Python.h is missing (Debian, Ubuntu: python3-dev)"
}

install_fairseq() {  # -O0: half the build time, and nothing here runs the compiled parts
  local partial="$wheels/partial.$$"
  if [ -z "$(wheel)" ]; then
    CFLAGS=-O0 pip wheel --no-deps --no-build-isolation -w "$partial" "$fairseq" &&
      mv "$partial"/*.whl "$wheels/" && rm -rf "$partial" || { rm -rf "$partial"; return 1; }
  fi
  pip install --no-deps --force-reinstall "$(wheel)" && "$python" -c 'import fairseq' ||
    { rm -f "$(wheel)"; return 1; }
}

# Attention's kernel is compiled where it is first used; here already, where that is possible.
build_kernel() { "$python" -m relpos_fairseq.attention.native; }
go_without() { printf 'not built, a slower backend serves instead: %s\n' "$(tail -n 1 "$log")"; }

main() {
  local first all tests= kernel
  while [ $# -gt 0 ]; do
    case "$1" in
      --test) tests=yes ;;
      --python | --python=*)
        [ "$1" != --python ] || { [ $# -gt 1 ] || die "--python needs a version, as in --python 3.12"; shift; }
        wanted_version=${1#--python=}
        [[ $wanted_version =~ ^3\.[0-9]+$ ]] || die "--python must be a version as 3.12, got $wanted_version"
        [ "${wanted_version#3.}" -ge 10 ] || die "--python must be 3.10 or newer, got $wanted_version"
        place ".venv-$wanted_version" ;;
      -h | --help) usage; exit 0 ;;
      *) usage >&2; die "unknown option $1" ;;
    esac
    shift
  done
  # pip settings and paths of the caller that would lead packages past .venv.
  unset PYTHONPATH PYTHONHOME PIP_TARGET PIP_PREFIX PIP_REQUIREMENT
  export PIP_USER=0 PIP_REQUIRE_VIRTUALENV=0 PYTHONNOUSERSITE=1
  # Two commands started at the same time: the second waits for the first.
  if command -v flock >/dev/null; then exec 9<"$root/scripts/install.sh" && flock 9; fi
  trap 'echo; echo "[install] interrupted; run the same command again to continue" >&2; exit 130' INT
  ensure_venv
  all=$(pins requirements.txt)
  first=$(grep -E '^(torch|setuptools|wheel)[<=]=' <<<"$all")
  choose_wheels "$(sed -n 's/^torch[<=]=/torch/p' <<<"$all")"
  check_compiler
  kernel=$(cat "$root"/relpos_fairseq/attention/native/*.[ch] "$root"/relpos_fairseq/attention/native/build.py)
  # shellcheck disable=SC2046,SC2086  # a pin is a word
  {
    step torch "$first" "torch, the largest part (minutes)" pip install $first
    step packages "$all" "the other packages" pip install --no-build-isolation $all
    step fairseq "$fairseq" "fairseq (minutes if it must be compiled)" install_fairseq
    [ -z "$tests" ] || tests=$(pins requirements-test.txt)
    [ -z "$tests" ] || step tests "$tests" "the packages of the tests" pip install $tests
  }
  step package "$(cat "$root"/{setup.py,pyproject.toml,relpos_fairseq/version.py})" \
    "this repository" pip install --no-deps --no-build-isolation -e "$root"
  on_failure=go_without step kernel "$kernel" "the attention kernel for this processor" build_kernel
  say "ready: $venv"
}

main "$@"
