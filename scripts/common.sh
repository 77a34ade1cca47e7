# Shared by ./demo, ./test and the scripts beside this file, which source it from the checkout's root.

# Another Python's modules, or a pip told to install elsewhere, must not leak into .venv.
unset CDPATH PYTHONHOME PYTHONPATH PIP_TARGET PIP_PREFIX PIP_REQUIRE_VIRTUALENV
export PIP_USER=0 PIP_NO_INPUT=1 PIP_DISABLE_PIP_VERSION_CHECK=1

venv=$PWD/.venv
log=${KVSIEVE_LOG:-build/log/setup.log}

# Lines of a log shown when a step fails. CI keeps no files, so there we show (nearly) all of it.
tail_lines=30
[ "${CI:-}" != true ] || tail_lines=2000

say() {
  printf 'kvsieve: %s\n' "$*"
}

die() {
  printf 'kvsieve: error: %s\n' "$*" >&2
  exit 1
}

# step MESSAGE COMMAND...: one progress line; the command's output goes to $log, whose tail is shown
# if it fails. Returns the command's status.
step() {
  step_message=$1
  shift
  printf 'kvsieve: %s ... ' "$step_message"
  mkdir -p "$(dirname "$log")"
  step_start=$(date +%s)
  printf '\n== %s\n' "$step_message" >>"$log"
  step_first=$(wc -l <"$log")
  step_status=0
  "$@" >>"$log" 2>&1 </dev/null || step_status=$?
  if [ "$step_status" -eq 0 ]; then
    printf 'ok (%d s)\n' "$(($(date +%s) - step_start))"
  else
    printf 'failed; the end of %s:\n' "$log"
    tail -n "+$((step_first + 1))" "$log" | tail -n "$tail_lines" | sed 's/^/  | /'
  fi
  return "$step_status"
}
