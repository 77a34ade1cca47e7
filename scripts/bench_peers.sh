#!/bin/sh
# Install the engines that have a package into .venv, then time kvsieve beside them for about
# 10 minutes. Arguments go to benchmarks/compare_peers.py and win over the ones given here.
set -eu
cd "$(dirname "$0")/.."
scripts/setup.sh
KVSIEVE_LOG=build/log/bench_peers.log
. scripts/common.sh
. scripts/compiler.sh
rm -f "$log"

# has PACKAGE [VERSION]: whether it is installed, in that version if one is named.
has() {
  "$venv/bin/python" -c 'import sys; from importlib.metadata import version as v
sys.exit(v(sys.argv[1]) != (sys.argv[2:] or [v(sys.argv[1])])[0])' "$@" 2>/dev/null
}

# add PACKAGE REQUIREMENT MESSAGE: one that cannot be installed is left out of the comparison.
add() {
  step "$3" "$venv/bin/python" -m pip install "$2" || say "going on without $1"
}

has matplotlib || add matplotlib "matplotlib>=3.8" "installing matplotlib"
has openvino-genai || add openvino-genai openvino-genai "installing OpenVINO GenAI"
has llama-cpp-python 0.3.36 || {
  mkdir -p "$(dirname "$log")"
  choose_compiler
  add llama-cpp-python "llama-cpp-python==0.3.36" \
    "building llama.cpp from its package (several minutes)"
}

exec "$venv/bin/python" benchmarks/compare_peers.py --depths 512,4096 --rounds 3 --passkey 2000 \
  --out report/peers "$@"
