#!/bin/sh
# Every check that runs no test: format, lint, types, layers. Uses .venv as scripts/setup.sh dev left it.
set -eu
cd "$(dirname "$0")/.."
KVSIEVE_LOG=build/log/lint.log
. scripts/common.sh

bin=$venv/bin
failed=0
rm -f "$log"

native_format() {
  find native -type f \( -name '*.cpp' -o -name '*.h' \) -exec "$bin/clang-format" "$@" {} +
}

if [ "${1:-}" = --fix ]; then
  step "ruff check --fix" "$bin/ruff" check --fix . || failed=1
  step "ruff format" "$bin/ruff" format . || failed=1
  step "clang-format" native_format -i || failed=1
  exit "$failed"
fi

step "ruff check" "$bin/ruff" check . || failed=1
step "ruff format --check" "$bin/ruff" format --check . || failed=1
step "clang-format --dry-run" native_format --dry-run --Werror || failed=1
step "mypy" "$bin/mypy" || failed=1
step "import-linter" "$bin/lint-imports" || failed=1
exit "$failed"
