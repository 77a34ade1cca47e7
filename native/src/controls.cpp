// Selectors for evaluation only: `oracle`, by true masses, and `random`; the twin of
// kernels/reference/controls.py.
#include <algorithm>

#include "kvsieve/selection.h"

namespace kvsieve {

namespace {

// Spreads 64 bits over 64 bits, one to one; constants as in the generator SplitMix64.
uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

}  // namespace

void Selection::true_masses(const Segment& s, int layer, int kv_head, const Queries& q, int rows,
                            int own, const int* visible, float* masses, int stride, float* top,
                            int thread) {
  const ptrdiff_t tokens = ptrdiff_t{own + 1} * kBlock;
  float* logits = scratch_[thread].all_logits.data();  // [row][tokens]
  for (int page = 0; page <= own; page++)
    kernels_.page_logits(s.layout, s.page(layer, kv_head, page), q, rows, logits + page * kBlock,
                         static_cast<int>(tokens));
  for (int r = 0; r < rows; r++) {
    const float* row = logits + r * tokens;
    top[r] = *std::max_element(row, row + visible[r]);
    for (int page = 0; page <= own; page++) {
      float mass = 0;
      for (int t = page * kBlock; t < std::min((page + 1) * kBlock, visible[r]); t++)
        mass += kernels_.exp(row[t] - top[r]);
      masses[static_cast<ptrdiff_t>(r) * stride + page] = mass;
    }
  }
}

void Selection::draw(const Plan& plan, int layer, int head, int position, int count, float* out) {
  uint64_t key = 0;
  for (int number : {plan.seed, layer, head, position})
    key = mix(key ^ static_cast<uint32_t>(number));
  for (int b = 0; b < count; b++)
    out[b] = static_cast<float>(mix(key ^ static_cast<uint32_t>(b)) >> 40) * 0x1p-24f;
}

void Selection::select_decode_at_random(const Segment& s, int layer, int head, Lists& lists,
                                        int thread) {
  Scratch& scratch = scratch_[thread];
  const int position = s.end() - 1, count = position / s.plan.block_size + 1;
  const int first = head * (shape_.num_q_heads / lists.heads);  // of the heads that choose together
  draw(s.plan, layer, first, position, count, scratch.merged.data());
  PickScratch marks{scratch.taken.data(), scratch.order.data()};
  pick(s, scratch.merged.data(), count, nullptr, marks);
  store_list(s, marks.taken, s.num_blocks(), head, 0, lists);
}

}  // namespace kvsieve
