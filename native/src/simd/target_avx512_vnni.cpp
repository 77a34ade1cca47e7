#define KVSIEVE_TARGET avx512_vnni
#define KVSIEVE_TARGET_NAME "avx512-vnni"
#include "avx512.h"
// The lane types come first.
#include "../kernels/table.h"

namespace kvsieve {
extern const Kernels* const kernels_avx512_vnni;
const Kernels* const kernels_avx512_vnni = &avx512_vnni::kTable;
}  // namespace kvsieve
