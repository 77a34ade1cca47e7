#define KVSIEVE_TARGET neon_dotprod
#define KVSIEVE_TARGET_NAME "neon-dotprod"
#include "neon.h"
// The lane types come first.
#include "../kernels/table.h"

namespace kvsieve {
extern const Kernels* const kernels_neon_dotprod;
const Kernels* const kernels_neon_dotprod = &neon_dotprod::kTable;
}  // namespace kvsieve
