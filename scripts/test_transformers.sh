#!/bin/sh
# Install the extra `transformers` into .venv, and what Transformers reads GGUF files with; then run the
# tests that need it, those on the real model included. Arguments go to pytest.
set -eu
cd "$(dirname "$0")/.."
scripts/setup.sh dev
KVSIEVE_LOG=build/log/test-transformers.log
. scripts/common.sh
rm -f "$log"

extra=$("$venv/bin/python" -c '
from importlib.metadata import requires

named = [one.split(";") for one in requires("kvsieve")]
print(*(name.strip() for name, *marker in named if marker and "transformers" in marker[0]))')
[ -n "$extra" ] || die "the package in .venv has no extra 'transformers'"

# shellcheck disable=SC2086 # one requirement per word
step "installing $extra (the first time several minutes)" \
  "$venv/bin/python" -m pip install $extra accelerate || die "the extra cannot be installed"

exec "$venv/bin/python" -m pytest tests/integrations tests/test_transformers.py \
  -m "slow or not slow" "$@"
