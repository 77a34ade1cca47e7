#!/bin/sh
# The ARM core under emulation: builds it with Debian's cross-compiler, and runs every kernel of every
# instruction set against the scalar kernels, on a processor with dot products and on one without.
# With a compiler for this machine too, results must also have the bits that they have here.
set -eu
cd "$(dirname "$0")/.."
KVSIEVE_LOG=build/log/test-arm.log
. scripts/common.sh

missing=
need() { # PROGRAM PACKAGE
  command -v "$1" >/dev/null 2>&1 || missing="$missing $2"
}
need aarch64-linux-gnu-g++ g++-aarch64-linux-gnu
need qemu-aarch64 qemu-user
need cmake cmake
need make make
[ -z "$missing" ] || die "make test-arm needs more programs: apt install$missing"
rm -f "$log"

build() { # FOLDER CMAKE_OPTION...
  folder=$1
  shift
  cmake -S . -B "$folder" -G "Unix Makefiles" -DKVSIEVE_BUILD_MODULE=OFF -DKVSIEVE_BUILD_TESTS=ON \
    -DCMAKE_COMPILE_WARNING_AS_ERROR=ON "$@" && cmake --build "$folder" -j "$(nproc)"
}

# parity NAME COMMAND...: runs the test; its lines go to build/arm/NAME.txt, and to the log.
parity() {
  lines=build/arm/$1.txt
  shift
  parity_status=0
  "$@" >"$lines" || parity_status=$?
  cat "$lines"
  return "$parity_status"
}

emulated() { # NAME CPU
  parity "$1" qemu-aarch64 -cpu "$2" -L /usr/aarch64-linux-gnu build/arm/parity
}

# says NAME WORDS: whether a line of the run NAME consists of these words.
says() {
  tr -s ' ' <"build/arm/$1.txt" | grep -qx "$2"
}

# The scalar kernels' lines hold digests of all results.
same_as_here() {
  parity here build/arm/here/parity || return 1
  for name in here with without; do
    grep '^scalar ' "build/arm/$name.txt" >"build/arm/$name.scalar"
  done
  diff build/arm/here.scalar build/arm/with.scalar &&
    diff build/arm/here.scalar build/arm/without.scalar
}

step "building the core for ARM" build build/arm -DCMAKE_SYSTEM_NAME=Linux \
  -DCMAKE_SYSTEM_PROCESSOR=aarch64 -DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ || exit 1
step "every kernel, on a processor with dot products" emulated with max || exit 1
says with "neon-dotprod project .* same bits" || die "neon-dotprod did not run; see build/arm/with.txt"
step "every kernel, on a processor without" emulated without cortex-a53 || exit 1
says without "neon-dotprod unsupported by this processor" ||
  die "neon-dotprod was not found unsupported; see build/arm/without.txt"
if command -v c++ >/dev/null 2>&1; then
  step "building the core for this machine" build build/arm/here || exit 1
  step "every kernel here, and the same bits there" same_as_here || exit 1
else
  say "no compiler for this machine: its results were not compared with ARM's"
fi
