// Selection by shares of the attention: what is particular to selector `anchors`.
#include <algorithm>

#include "kvsieve/selection.h"

namespace kvsieve {

namespace {

int ceil_div(int a, int b) { return (a + b - 1) / b; }

Queries row_of(Queries q, int row) {
  q.values += static_cast<ptrdiff_t>(row) * q.stride;
  q.codes += static_cast<ptrdiff_t>(row) * q.stride;
  q.scale += static_cast<ptrdiff_t>(row) * q.scale_stride;
  q.codes_sum += static_cast<ptrdiff_t>(row) * q.sum_stride;
  return q;
}

}  // namespace

void Selection::add_shares(const Segment& s, int layer, int kv_head, const Queries& q, int rows,
                           int own, const int* visible, bool first, float* shares, float* masses,
                           float* top, int thread) {
  const int stride = Anchors::stride(s), pages_per_block = s.plan.block_size / kBlock;
  const int count = ceil_div(own + 1, pages_per_block);
  anchors_.estimate(s, layer, kv_head, q, rows, own, visible, masses, stride, top, thread);
  if (first) std::fill_n(shares, count, 0.0f);
  for (int r = 0; r < rows; r++) {
    const float* row = masses + static_cast<ptrdiff_t>(r) * stride;
    float total = 0;
    for (int page = 0; page <= own; page++) total += row[page];
    for (int b = 0, page = 0; b < count; b++) {
      float share = 0;
      for (; page <= own && page / pages_per_block == b; page++) share += row[page] / total;
      // Under a mass budget the sum, for a mean: shares of all rows' attention must add up to 1.
      shares[b] = s.plan.mass > 0 ? shares[b] + share : std::max(shares[b], share);
    }
  }
}

void Selection::score_shares(const Segment& s, int layer, int kv_head, const Queries& q, int rows,
                             float* out, int stride, int thread) {
  const int n = s.end();
  float top;
  for (int r = 0; r < rows; r++)
    add_shares(s, layer, kv_head, row_of(q, r), 1, s.num_blocks() - 1, &n, true, out + r * stride,
               scratch_[thread].masses.data(), &top, thread);
}

void Selection::select_decode_by_shares(const Segment& s, const FoldedQueries& queries, int layer,
                                        int head, Lists& lists, int thread) {
  Scratch& scratch = scratch_[thread];
  const int n = s.end(), own = s.num_blocks() - 1, stride = Anchors::stride(s);
  const int group = shape_.group_size(), per_list = shape_.num_q_heads / lists.heads;
  const int first = head * per_list, count = ceil_div(n, s.plan.block_size);
  float* shares = scratch.merged.data();
  float* masses = scratch.masses.data();
  int visible[kMaxRows];
  std::fill_n(visible, kMaxRows, n);
  for (int h = 0; h < per_list; h += kMaxRows)
    add_shares(s, layer, first / group, queries.view(s, 0, first + h, true),
               std::min(kMaxRows, per_list - h), own, visible, h == 0, shares,
               masses + static_cast<ptrdiff_t>(h) * stride, &lists.skipped_top[first + h], thread);
  if (s.plan.mass > 0)
    for (int b = 0; b < count; b++) shares[b] /= static_cast<float>(per_list);
  PickScratch marks{scratch.taken.data(), scratch.order.data()};
  pick(s, shares, count, nullptr, marks);
  store_list(s, marks.taken, s.num_blocks(), head, 0, lists);
  const int pages_per_block = s.plan.block_size / kBlock;
  for (int h = 0; h < per_list; h++) {
    const float* row = masses + static_cast<ptrdiff_t>(h) * stride;
    float skipped = 0;
    for (int page = 0; page <= own; page++)
      if (!marks.taken[page / pages_per_block]) skipped += row[page];
    lists.skipped[first + h] = skipped;
  }
}

void Selection::tile_shares(const Segment& s, const FoldedQueries& queries, int layer, int kv_head,
                            int tile, float* shares, int thread) {
  const int own = s.first_tile() + tile, group = shape_.group_size();
  const int begin = s.tile_begin(tile) - s.start, end = s.tile_end(tile) - s.start;
  bool first = true;
  for (int g = 0; g < group; g++)
    for (int row = begin; row < end; row += kMaxRows, first = false) {
      int visible[kMaxRows];
      float top[kMaxRows];
      for (int r = 0; r < kMaxRows; r++) visible[r] = s.start + row + r + 1;
      add_shares(s, layer, kv_head, queries.view(s, row, kv_head * group + g, false),
                 std::min(kMaxRows, end - row), own, visible, first, shares,
                 scratch_[thread].masses.data(), top, thread);
    }
  if (s.plan.mass > 0) {
    const float rows = static_cast<float>((end - begin) * group);
    for (int b = 0; b < ceil_div(own + 1, s.plan.block_size / kBlock); b++) shares[b] /= rows;
  }
}

}  // namespace kvsieve
