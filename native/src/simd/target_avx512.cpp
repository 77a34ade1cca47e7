#define KVSIEVE_TARGET avx512
#define KVSIEVE_TARGET_NAME "avx512"
#include "avx512.h"
// The lane types come first.
#include "../kernels/table.h"

namespace kvsieve {
extern const Kernels* const kernels_avx512;
const Kernels* const kernels_avx512 = &avx512::kTable;
}  // namespace kvsieve
