#!/bin/sh
# A kvsieve server by hand: examples/curl.sh [URL]
set -eu
url=${1:-http://127.0.0.1:8080}
key=${OPENAI_API_KEY:-none}

ask() {
  path=$1
  shift
  printf '\n-- %s\n' "$path"
  curl -sS -H "Authorization: Bearer $key" "$@" "$url$path"
  echo
}

ask /health
ask /v1/models
ask /v1/chat/completions -d '{
  "messages": [{"role": "user", "content": "Say hello."}],
  "temperature": 0, "max_tokens": 20
}'
# -N shows the events as they come; the first ones say how far the prompt is.
ask /v1/chat/completions -N -d '{
  "messages": [{"role": "user", "content": "Count to five."}],
  "temperature": 0, "max_tokens": 20, "stream": true, "return_progress": true
}'
# Sparse attention for one request: at most 16 blocks of 32 tokens for each query.
ask /completion -d '{
  "prompt": "The capital of France is", "n_predict": 8, "temperature": 0,
  "sparse": {"k": 16}
}'
ask /tokenize -d '{"content": "Hello there", "with_pieces": true}'
ask /apply-template -d '{"messages": [{"role": "user", "content": "Hi"}]}'
ask /slots
ask /metrics | head -n 20
