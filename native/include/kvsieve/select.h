// The rules that choose blocks from their scores; the twin of kernels/reference/selection.py.
#pragma once

#include <algorithm>
#include <cstdint>

namespace kvsieve {

// Scratch of one thread: room for one entry per selection block.
struct PickScratch {
  uint8_t* taken;
  int32_t* order;
};

// Each marks the chosen ones of `count` blocks in scratch.taken. `k` counts blocks. Ties go to the
// lower index.

// Guards first: the last block, then block 0 and the one before the last (in the other order for a
// prompt tile, `neighbour_first`), while k allows; then by score.
void pick_guarded(const float* scores, int count, int k, bool neighbour_first, PickScratch scratch);

// The first and the last, then by score.
void pick_ends(const float* scores, int count, int k, PickScratch scratch);

// The same guards, then by score until the scores of the chosen (shares of a mass, summing to 1)
// reach `mass`; at least k_min and at most k.
void pick_mass(const float* shares, int count, float mass, int k_min, int k, bool neighbour_first,
               PickScratch scratch);

// Guards, then the best by share, `count_taken` in all; the worst `margin` of them by share are
// marked with 1, the others with 2.
void pick_candidates(const float* shares, int count, int count_taken, int margin,
                     PickScratch scratch);

// The last k blocks, block 0 in place of the oldest of them.
void pick_window(int count, int k, PickScratch scratch);

// The original's rule: half of the budget by importance (null: none), the rest by score, and the
// last block in place of the lowest-scoring one of those.
void pick_probe(const float* scores, const int64_t* importance, int count, int k,
                PickScratch scratch);

// Super-blocks (groups of the index, 16 selection blocks each) up to which there is one level, and
// that are scored in full beyond: 16, or what holds twice the budget.
inline int num_candidates(int k) {
  const int twice = 2 * ((k + 15) / 16);
  return twice > 16 ? twice : 16;
}

// Under selector `anchors`, selection blocks whose exact mass is found before a decoded token's are
// chosen, and how many of these show how wrong the estimate is for the others.
constexpr int kRefineMargin = 16;
inline int num_refined(int k) { return std::max(64, k + kRefineMargin); }

// merged[b] = max over rows of (score - the row's maximum over the first `counted` blocks).
// Call with first = true for the first row.
void merge_row(const float* scores, int count, int counted, bool first, float* merged);

}  // namespace kvsieve
