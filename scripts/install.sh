#!/usr/bin/env bash
# Makes .venv in the repository root and installs the tested versions into it.
# Steps that are done and unchanged are skipped, so a second run is quick and needs no network.
set -euo pipefail

usage() {
  cat <<'TEXT'
usage: bash scripts/install.sh [--test]

Makes .venv in the repository root and installs scripts/requirements.txt, fairseq and this
repository (editable) into it; --test adds scripts/requirements-test.txt. What is done and
unchanged is skipped; an interrupted run is continued by running it again.

Needs Python 3.11 or 3.12 with pip and venv, and where fairseq comes without a ready-made wheel
(Python 3.11) gcc and g++; gcc also for attention's fastest kernel on CPUs, compiled here where there
is one. About 2 GB of disk with a CPU build of torch, more with a CUDA build.

environment variables:
  PYTHON            the interpreter to use (default: the first fitting one on PATH)
  XDG_CACHE_HOME    built fairseq wheels are kept in its relpos_fairseq/wheels, the attention kernel
                    in its relpos_fairseq (default: ~/.cache)
  RELPOS_CACHE      a folder for the kernel alone, which then comes first
  pip's own (PIP_INDEX_URL, PIP_FIND_LINKS, HTTPS_PROXY ...) are respected; with them a CPU build
                    of torch can be chosen where the default is a CUDA build
TEXT
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
venv="$root/.venv"
python="$venv/bin/python"
stamps="$venv/.stamps"
log="$venv/install.log"
fairseq="fairseq-fixed==0.12.3.1"
with_tests=no

say() { printf '[install] %s\n' "$*"; }
die() { printf '[install] error: %s\n' "$*" >&2; exit 1; }

# --- the interpreter -------------------------------------------------------------------------

version_of() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true; }

find_python() {
  local candidate wanted
  if [ -n "${PYTHON:-}" ]; then
    [ -n "$(version_of "$PYTHON")" ] || die "PYTHON=$PYTHON does not run"
    echo "$PYTHON"
    return
  fi
  for wanted in '3.11 3.12' '3.13 3.10'; do
    for candidate in python3 python3.11 python3.12 python3.13 python3.10 python; do
      case " $wanted " in *" $(version_of "$candidate") "*) echo "$candidate"; return ;; esac
    done
  done
  die "no Python 3.11 or 3.12 found on PATH; install one, or name it: PYTHON=/path/to/python3.11"
}

check_version() {  # VERSION WHAT
  case "$1" in
    3.11 | 3.12) ;;
    3.10 | 3.13) say "note: Python $1 is untested here; 3.11 and 3.12 are tested" ;;
    *) die "$2 is Python ${1:-of unknown version}; Python 3.11 or 3.12 is needed" ;;
  esac
}

# --- steps and their stamps ------------------------------------------------------------------

is_done() { [ -f "$stamps/$1" ] && [ "$(cat "$stamps/$1")" = "$2" ]; }

# A stamp holds the step's inputs word for word: "unchanged" is equality, no hash tool is needed.
step() {  # NAME INPUTS DESCRIPTION COMMAND...
  local name=$1 inputs=$2 description=$3 start=$SECONDS
  shift 3
  is_done "$name" "$inputs" && return
  printf '[install] %s ... ' "$description"
  printf '\n=== %s\n' "$description" >>"$log"
  if "$@" >>"$log" 2>&1 </dev/null; then
    printf '%s' "$inputs" >"$stamps/$name.new"
    mv "$stamps/$name.new" "$stamps/$name"
    printf '%d s\n' $((SECONDS - start))
  else
    printf 'failed\n'
    explain_failure
  fi
}

explain_failure() {
  {
    echo "[install] the last lines of $log:"
    tail -n 20 "$log" | sed 's/^/    /'
    if tail -n 60 "$log" | grep -qiE 'No space left'; then
      echo "[install] the disk is full: make room, then run the same command again"
    elif tail -n 60 "$log" | grep -qiE 'connection|timed out|name resolution|No matching dist'; then
      echo "[install] check network, proxy and pip's index settings, then run the same command again"
    else
      echo "[install] mend what the lines above name, then run the same command again"
    fi
    echo "[install] finished steps are kept; to start over, delete $venv"
  } >&2
  exit 1
}

# --- what each step does ---------------------------------------------------------------------

pip() { "$python" -m pip --no-input --disable-pip-version-check "$@"; }
first_pins() { pins requirements.txt | grep -E '^(torch|setuptools|wheel)[<=]='; }
pins() {  # FILE; some of the versions have left Python 3.10 behind: there the newest ones up to them
  local exactly='=='
  case "$(version_of "$python")" in 3.10) exactly='<=' ;; esac
  sed -n "/^[A-Za-z0-9]/s/==/$exactly/p" "$root/scripts/$1"
}

# A step that never finished may have left half-copied packages: copy all of its packages again.
install_pins() {  # STEP PIP-ARGUMENTS...
  local name=$1 again=() status=0
  shift
  if [ -f "$stamps/$name.begun" ]; then again=(--ignore-installed); fi
  if [ ! -f "$stamps/$name" ]; then touch "$stamps/$name.begun"; fi
  pip install ${again[@]+"${again[@]}"} "$@" || status=$?
  # pip that ended by itself, well or not, left nothing half-copied; a killed one keeps the mark.
  if [ "$status" -lt 128 ]; then rm -f "$stamps/$name.begun"; fi
  return "$status"
}

make_venv() {
  local clear=()
  if [ -e "$venv/pyvenv.cfg" ]; then clear=(--clear); fi
  say "making .venv with $("$1" --version 2>&1)"
  "$1" -m venv ${clear[@]+"${clear[@]}"} "$venv" ||
    die "could not make $venv; Debian and Ubuntu need the package python3-venv"
  mkdir -p "$stamps"
}

ensure_venv() {
  local base here
  if [ -e "$venv" ] && [ ! -e "$venv/pyvenv.cfg" ]; then
    die "$venv exists and is no virtual environment; move it away"
  fi
  # Scripts in a virtual environment name its place: a moved repository needs a new one.
  here=$(cat "$stamps/place" 2>/dev/null || echo "$venv")
  if [ "$here" != "$venv" ] || ! "$python" -m pip --version >/dev/null 2>&1; then
    base=$(find_python)
    check_version "$(version_of "$base")" "$base"
    "$base" -c 'import venv, ensurepip' 2>/dev/null ||
      die "$base has no venv or ensurepip; Debian and Ubuntu need the package python3-venv"
    make_venv "$base"
  else
    check_version "$(version_of "$python")" "$venv"
  fi
  mkdir -p "$stamps"
  printf '%s' "$venv" >"$stamps/place"
}

wheel_folder() {
  local torch tag
  torch=$(first_pins | sed -n 's/^torch[<=]=//p')
  tag=$("$python" -c 'import sys, sysconfig; print("cp%d%d-%s" % (*sys.version_info[:2],
    sysconfig.get_platform()))' | tr -c 'A-Za-z0-9_.\n-' _)
  echo "${XDG_CACHE_HOME:-${HOME:-$venv}/.cache}/relpos_fairseq/wheels/$tag-torch$torch"
}

find_wheel() { find "$1" -maxdepth 1 -name "fairseq_fixed-${fairseq#*==}-*.whl" 2>/dev/null | head -n 1; }

check_compiler() {  # needed only where no wheel is published (it is for 3.12 on Linux) or kept
  local tool
  is_done fairseq "$fairseq" && return
  [ -z "$(find_wheel "$(wheel_folder)")" ] || return 0
  case "$(version_of "$python")-$(uname -sm)" in "3.12-Linux x86_64") return ;; esac
  for tool in gcc g++; do
    command -v "$tool" >/dev/null ||
      die "$tool is missing and fairseq must be compiled; Debian and Ubuntu: the package build-essential"
  done
  [ -f "$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" ] ||
    die "Python.h is missing and fairseq must be compiled; Debian and Ubuntu: the package python3-dev"
}

install_fairseq() {
  local folder wheel partial
  folder=$(wheel_folder)
  mkdir -p "$folder" 2>/dev/null || { folder="$venv/wheels"; mkdir -p "$folder"; }
  wheel=$(find_wheel "$folder")
  if [ -z "$wheel" ]; then
    partial="$folder/partial.$$"
    # Without optimisation: half the build time, and nothing here runs the compiled parts.
    CFLAGS=-O0 pip wheel --no-deps --no-build-isolation -w "$partial" "$fairseq" &&
      mv "$partial"/*.whl "$folder/" && rm -rf "$partial" || { rm -rf "$partial"; return 1; }
    wheel=$(find_wheel "$folder")
  fi
  pip install --no-deps --force-reinstall "$wheel" && "$python" -c 'import fairseq' ||
    { rm -f "$wheel"; return 1; }
}

# Attention's kernel is compiled where it is first used; here already, where that is possible.
build_kernel() {  # SOURCES
  is_done kernel "$1" && return
  printf '[install] the attention kernel for this processor ... '
  printf '\n=== the attention kernel\n' >>"$log"
  if "$python" -m relpos_fairseq.attention.native >>"$log" 2>&1 </dev/null; then
    printf '%s' "$1" >"$stamps/kernel.new"
    mv "$stamps/kernel.new" "$stamps/kernel"
    printf 'done\n'
  else
    printf 'not built, a slower backend serves instead: %s\n' "$(tail -n 1 "$log")"
  fi
}

main() {
  local first all tests package
  while [ $# -gt 0 ]; do
    case "$1" in
      --test) with_tests=yes ;;
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
  check_compiler
  all=$(pins requirements.txt)
  tests=$(pins requirements-test.txt)
  package=$(cat "$root/setup.py" "$root/pyproject.toml" "$root/relpos_fairseq/version.py")
  first=$(first_pins)
  # shellcheck disable=SC2086  # a pin is a word
  step torch "$first" "torch, the largest part (minutes)" install_pins torch $first
  # shellcheck disable=SC2086
  step packages "$all" "the other packages" install_pins packages --no-build-isolation $all
  step fairseq "$fairseq" "fairseq (minutes if it must be compiled)" install_fairseq
  if [ "$with_tests" = yes ]; then
    # shellcheck disable=SC2086
    step tests "$tests" "the packages of the tests" install_pins tests $tests
  fi
  step package "$package" "this repository" \
    pip install --no-deps --no-build-isolation -e "$root"
  build_kernel "$(cat "$root"/relpos_fairseq/attention/native/*.[ch] "$root"/relpos_fairseq/attention/native/build.py)"
  say "ready: $venv"
}

main "$@"
