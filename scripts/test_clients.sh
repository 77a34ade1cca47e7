#!/bin/sh
# Install the packages of the extra `clients` into .venv, then drive the server with them on the real
# model. Arguments go to pytest.
set -eu
cd "$(dirname "$0")/.."
scripts/setup.sh dev
KVSIEVE_LOG=build/log/test-clients.log
. scripts/common.sh
rm -f "$log"

# The releases that the tests are known to pass with.
tested="litellm==1.110.2 langchain-openai==1.7.4"

# shellcheck disable=SC2086 # one requirement per word
step "installing $tested" \
  "$venv/bin/python" -m pip install $tested || die "they cannot be installed"

exec "$venv/bin/python" -m pytest tests/server/test_other_clients.py -m "slow or not slow" "$@"
