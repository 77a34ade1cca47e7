#!/bin/sh
# The avx-vnni kernels on a processor with AVX-512 VNNI, in that set's encoding of the same instruction:
# every kernel of every instruction set that runs here against the scalar kernels.
set -eu
cd "$(dirname "$0")/.."
KVSIEVE_LOG=build/log/test-avx-vnni.log
. scripts/common.sh
rm -f "$log"
grep -qw avx512_vnni /proc/cpuinfo || die "make test-avx-vnni needs a processor with AVX-512 VNNI"

build() {
  cmake -S . -B build/avx-vnni -DKVSIEVE_BUILD_MODULE=OFF -DKVSIEVE_BUILD_TESTS=ON \
    -DKVSIEVE_AVX_VNNI_BY_AVX512=ON && cmake --build build/avx-vnni -j "$(nproc)"
}

step "building the core" build || exit 1
step "every kernel" build/avx-vnni/parity || exit 1
tr -s ' ' <"$log" | grep -q "^avx-vnni project .* same bits" || die "avx-vnni did not run; see $log"
