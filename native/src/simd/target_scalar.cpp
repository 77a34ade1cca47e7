#define KVSIEVE_TARGET scalar
#define KVSIEVE_TARGET_NAME "scalar"
#include "scalar.h"
// The lane types come first.
#include "../kernels/table.h"

namespace kvsieve {
extern const Kernels* const kernels_scalar;
const Kernels* const kernels_scalar = &scalar::kTable;
}  // namespace kvsieve
