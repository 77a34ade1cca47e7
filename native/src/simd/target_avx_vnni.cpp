#define KVSIEVE_TARGET avx_vnni
#define KVSIEVE_TARGET_NAME "avx-vnni"
#include "avx2.h"
// The lane types come first.
#include "../kernels/table.h"

namespace kvsieve {
extern const Kernels* const kernels_avx_vnni;
const Kernels* const kernels_avx_vnni = &avx_vnni::kTable;
}  // namespace kvsieve
