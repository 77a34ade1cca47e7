// Which instruction sets are built in, and which of them this machine can run.
#include "kvsieve/kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

namespace kvsieve {

extern const Kernels* const kernels_scalar;
#if defined(__x86_64__)
extern const Kernels* const kernels_avx512_vnni;
extern const Kernels* const kernels_avx_vnni;
extern const Kernels* const kernels_avx512;
extern const Kernels* const kernels_avx2;
#elif defined(__aarch64__) && defined(__linux__)
extern const Kernels* const kernels_neon_dotprod;
#endif

#if defined(__x86_64__)
namespace {

struct X86Features {
  bool avx2 = false;  // with fma and f16c
  bool avx_vnni = false;
  bool avx512 = false;  // f, dq, bw, vl
  bool avx512_vnni = false;
};

bool all_set(unsigned bits, unsigned wanted) { return (bits & wanted) == wanted; }

// Asked by hand, because __builtin_cpu_supports is always false with zig's compiler runtime.
X86Features x86_features() {
  X86Features found;
  unsigned eax, ebx, ecx, edx;
  if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx) ||
      !all_set(ecx, bit_OSXSAVE | bit_AVX | bit_FMA | bit_F16C)) {
    return found;
  }
  // XCR0: which registers the system saves (2: SSE, 4: AVX, 0xe0: the three parts of AVX-512).
  unsigned saved, saved_high;
  asm("xgetbv" : "=a"(saved), "=d"(saved_high) : "c"(0));
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) || !all_set(saved, 0x6)) return found;
  found.avx2 = all_set(ebx, bit_AVX2);
  found.avx512 = found.avx2 && all_set(saved, 0xe6) &&
                 all_set(ebx, bit_AVX512F | bit_AVX512DQ | bit_AVX512BW | bit_AVX512VL);
  found.avx512_vnni = found.avx512 && all_set(ecx, bit_AVX512VNNI);
  const bool has_subleaf = eax >= 1;  // the highest one
  if (has_subleaf && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx))
    found.avx_vnni = found.avx2 && all_set(eax, 1u << 4);
#if defined(KVSIEVE_AVX_VNNI_BY_AVX512)
  found.avx_vnni = found.avx512_vnni;
#endif
  return found;
}

}  // namespace
#endif

const IsaInfo* isa_list(int* count) {
#if defined(__x86_64__)
  const auto [avx2, avx_vnni, avx512, avx512_vnni] = x86_features();
  static const IsaInfo list[] = {
      {"avx512-vnni", kernels_avx512_vnni, avx512_vnni},
      {"avx-vnni", kernels_avx_vnni, avx_vnni},
      {"avx512", kernels_avx512, avx512},
      {"avx2", kernels_avx2, avx2},
      {"scalar", kernels_scalar, true},
  };
#elif defined(__aarch64__) && defined(__linux__)
  const bool dotprod = getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
  static const IsaInfo list[] = {
      {"neon-dotprod", kernels_neon_dotprod, dotprod},
      {"scalar", kernels_scalar, true},
  };
#else
  static const IsaInfo list[] = {{"scalar", kernels_scalar, true}};
#endif
  *count = sizeof(list) / sizeof(list[0]);
  return list;
}

}  // namespace kvsieve
