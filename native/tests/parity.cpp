// Runs every kernel of every instruction set that this processor has against the scalar kernels,
// and demands the same bits. One line per kernel; exit code 1 if any differs.
#include <cstdio>

#include "check.h"

namespace kvsieve::test {
namespace {

bool check_all(Pair kernels) {
  bool same = true;
  for (auto check : {check_project, check_quantize_row, check_rms_norm, check_silu_mul,
                     check_gelu_mul, check_rope, check_append, check_fold_query, check_page_logits,
                     check_index_scores, check_vector_scores, check_anchor_logits,
                     check_block_masses, check_exact_masses, check_add_shares, check_attend_run,
                     check_merge_and_finish, check_add_importance, check_exp})
    same = check(kernels) && same;
  return same;
}

}  // namespace
}  // namespace kvsieve::test

int main() {
  int count;
  const kvsieve::IsaInfo* list = kvsieve::isa_list(&count);
  const kvsieve::Kernels& scalar = *list[count - 1].kernels;
  bool same = true;
  for (int i = 0; i < count; i++) {
    if (list[i].supported)
      same = kvsieve::test::check_all({*list[i].kernels, scalar}) && same;
    else
      std::printf("%-14s unsupported by this processor\n", list[i].name);
  }
  std::printf("%s\n", same ? "all kernels give the scalar kernels' bits" : "kernels DIFFER");
  return same ? 0 : 1;
}
