#define KVSIEVE_TARGET avx2
#define KVSIEVE_TARGET_NAME "avx2"
#include "avx2.h"
// The lane types come first.
#include "../kernels/table.h"

namespace kvsieve {
extern const Kernels* const kernels_avx2;
const Kernels* const kernels_avx2 = &avx2::kTable;
}  // namespace kvsieve
