#!/bin/sh
# Install the packages of the extra `transformers` into .venv, and what Transformers reads GGUF files with;
# then run the tests that need them, those on the real model included. Arguments go to pytest.
set -eu
cd "$(dirname "$0")/.."
scripts/setup.sh dev
KVSIEVE_LOG=build/log/test-transformers.log
. scripts/common.sh
rm -f "$log"

# The releases that the tests are known to pass with; `pip` decides which build of PyTorch that is,
# and the one for CPUs is enough.
tested="torch==2.13.0 transformers==5.24.0 accelerate"

# shellcheck disable=SC2086 # one requirement per word
step "installing $tested (the first time several minutes)" \
  "$venv/bin/python" -m pip install $tested || die "they cannot be installed"

exec "$venv/bin/python" -m pytest tests/integrations tests/test_transformers.py \
  -m "slow or not slow" "$@"
