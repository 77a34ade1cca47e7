// Which instruction sets are built in, and which of them this machine can run.
#include "kvsieve/kernels.h"

namespace kvsieve {

extern const Kernels* const kernels_scalar;
#if defined(__x86_64__)
extern const Kernels* const kernels_avx512_vnni;
extern const Kernels* const kernels_avx512;
extern const Kernels* const kernels_avx2;
#endif

const IsaInfo* isa_list(int* count) {
#if defined(__x86_64__)
  // __builtin_cpu_supports also asks the system whether it saves the wide registers.
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512dq");
  static const IsaInfo list[] = {
      {"avx512-vnni", kernels_avx512_vnni, avx512 && __builtin_cpu_supports("avx512vnni")},
      {"avx512", kernels_avx512, avx512},
      {"avx2", kernels_avx2, avx2},
      {"scalar", kernels_scalar, true},
  };
#else
  static const IsaInfo list[] = {{"scalar", kernels_scalar, true}};
#endif
  *count = sizeof(list) / sizeof(list[0]);
  return list;
}

}  // namespace kvsieve
