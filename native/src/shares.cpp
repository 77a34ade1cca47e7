// Selection by shares of the attention: what is particular to selectors `anchors` and `oracle`.
#include <algorithm>

#include "kvsieve/selection.h"

namespace kvsieve {

namespace {

int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Most by which the masses of blocks that were not refined are scaled.
constexpr float kMaxCorrection = 16;

// Chosen pages lie apart, which the processor's own prefetch does not follow.
constexpr int kPagesAhead = 2;
void ask_for_keys(const Segment& s, int layer, int kv_head, int block) {
  const uint8_t* page = s.page(layer, kv_head, block);
  for (size_t at = 0; at < s.layout.v; at += 64) __builtin_prefetch(page + at, 0, 3);
}

Queries row_of(Queries q, int row) {
  q.values += static_cast<ptrdiff_t>(row) * q.stride;
  q.codes += static_cast<ptrdiff_t>(row) * q.stride;
  q.scale += static_cast<ptrdiff_t>(row) * q.scale_stride;
  q.codes_sum += static_cast<ptrdiff_t>(row) * q.sum_stride;
  return q;
}

}  // namespace

void Selection::block_masses(const Segment& s, int layer, int kv_head, const Queries& q, int rows,
                             int own, const int* visible, float* masses, float* top, int thread) {
  const int stride = Anchors::stride(s);
  if (s.plan.selector == Selector::oracle || own == 0)  // an only block counts exactly
    true_masses(s, layer, kv_head, q, rows, own, visible, masses, stride, top, thread);
  else
    anchors_.estimate(s, layer, kv_head, q, rows, own, visible, masses, stride, top, thread);
}

void Selection::add_shares(const Segment& s, const float* masses, int rows, int own, bool first,
                           float* shares) const {
  const int stride = Anchors::stride(s), pages_per_block = s.plan.block_size / kBlock;
  const int count = ceil_div(own + 1, pages_per_block);
  // Under a mass budget the sum, for a mean: shares of all rows' attention must add up to 1.
  const bool add = s.plan.mass > 0;
  if (first) std::fill_n(shares, stride, 0.0f);
  for (int r = 0; r < rows; r++) {
    const float* row = masses + static_cast<ptrdiff_t>(r) * stride;
    if (pages_per_block == 1) {
      kernels_.add_shares(row, own + 1, add, shares);
      continue;
    }
    float total = 0;
    for (int page = 0; page <= own; page++) total += row[page];
    for (int b = 0, page = 0; b < count; b++) {
      float share = 0;
      for (const int end = std::min(own + 1, page + pages_per_block); page < end; page++)
        share += row[page] / total;
      shares[b] = add ? shares[b] + share : std::max(shares[b], share);
    }
  }
}

void Selection::score_shares(const Segment& s, int layer, int kv_head, const Queries& q, int rows,
                             float* out, int stride, int thread) {
  const int n = s.end(), own = s.num_blocks() - 1;
  float* masses = scratch_[thread].masses.data();
  float top;
  for (int r = 0; r < rows; r++) {
    block_masses(s, layer, kv_head, row_of(q, r), 1, own, &n, masses, &top, thread);
    add_shares(s, masses, 1, own, true, out + r * stride);
  }
}

template <class Use>
void Selection::each_rows(const Segment& s, const FoldedQueries& queries, int first, int heads,
                          const Use& use) const {
  for (int h = 0; h < heads; h += kMaxRows)
    use(queries.view(s, 0, first + h, true), std::min(kMaxRows, heads - h), h);
}

void Selection::refine(const Segment& s, const FoldedQueries& queries, int layer, int first,
                       int heads, const float* shares, float* masses, float* tops, int thread) {
  Scratch& scratch = scratch_[thread];
  const int own = s.num_blocks() - 1, indexed = own - 1, stride = Anchors::stride(s);
  const int pages_per_block = s.plan.block_size / kBlock, kv_head = first / shape_.group_size();
  PickScratch marks{scratch.taken.data(), scratch.order.data()};
  pick_candidates(shares, ceil_div(own + 1, pages_per_block), num_refined(s.plan.k), kRefineMargin,
                  marks);
  int pages = 0;
  int32_t* page = scratch.pages.data();
  for (int b = 0, next = 0; next < indexed; b++) {
    const int end = std::min(indexed, next + pages_per_block);
    if (!marks.taken[b]) next = end;
    for (; next < end; next++) page[pages++] = next;
  }
  float *logits = scratch.page_logits.data(), *exact = scratch.exact.data();
  each_rows(s, queries, first, heads, [&](const Queries& q, int rows, int h) {
    const int row_stride = pages * kBlock;
    for (int i = 0; i < pages; i++) {
      if (i + kPagesAhead < pages) ask_for_keys(s, layer, kv_head, page[i + kPagesAhead]);
      kernels_.page_logits(s.layout, s.page(layer, kv_head, page[i]), q, rows, logits + i * kBlock,
                           row_stride);
    }
    for (int r = 0; r < rows; r++) {
      float* mass = masses + static_cast<ptrdiff_t>(h + r) * stride;
      const float estimated_top = tops[h + r];
      tops[h + r] = kernels_.exact_masses(logits + static_cast<ptrdiff_t>(r) * row_stride, pages,
                                          estimated_top, exact);
      const float unit = kernels_.exp(estimated_top - tops[h + r]);
      for (int b = 0; b <= own; b++) mass[b] *= unit;
      float guess = 0, truth = 0;
      for (int i = 0; i < pages; i++)
        if (marks.taken[page[i] / pages_per_block] == 1) guess += mass[page[i]], truth += exact[i];
      const float scale = guess > 0 ? std::min(truth / guess, kMaxCorrection) : 1.0f;
      for (int b = 0; b < indexed; b++) mass[b] *= scale;
      for (int i = 0; i < pages; i++) mass[page[i]] = exact[i];
    }
  });
}

void Selection::select_decode_by_shares(const Segment& s, const FoldedQueries& queries, int layer,
                                        int head, Lists& lists, int thread) {
  Scratch& scratch = scratch_[thread];
  const int n = s.end(), own = s.num_blocks() - 1, stride = Anchors::stride(s);
  const int group = shape_.group_size(), heads = shape_.num_q_heads / lists.heads;
  const int first = head * heads, count = ceil_div(n, s.plan.block_size);
  float *shares = scratch.merged.data(), *masses = scratch.masses.data();
  float* tops = &lists.skipped_top[first];
  int visible[kMaxRows];
  std::fill_n(visible, kMaxRows, n);
  each_rows(s, queries, first, heads, [&](const Queries& q, int rows, int h) {
    float* found = masses + static_cast<ptrdiff_t>(h) * stride;
    block_masses(s, layer, first / group, q, rows, own, visible, found, tops + h, thread);
    add_shares(s, found, rows, own, h == 0, shares);
  });
  PickScratch marks{scratch.taken.data(), scratch.order.data()};
  if (s.plan.selector == Selector::anchors) {
    refine(s, queries, layer, first, heads, shares, masses, tops, thread);
    add_shares(s, masses, heads, own, true, shares);
  } else {  // every mass is true already
    std::fill_n(marks.taken, count, uint8_t{1});
  }
  for (int b = 0; b < count; b++) {
    if (!marks.taken[b])
      shares[b] = -__builtin_inff();  // nobody looked at its keys
    else if (s.plan.mass > 0)
      shares[b] /= static_cast<float>(heads);
  }
  pick(s, shares, count, nullptr, marks);
  store_list(s, marks.taken, s.num_blocks(), head, 0, lists);
  const int pages_per_block = s.plan.block_size / kBlock;
  for (int h = 0; h < heads; h++) {
    const float* row = masses + static_cast<ptrdiff_t>(h) * stride;
    float skipped = 0;
    for (int b = 0, page = 0; b < count; b++) {
      const int end = std::min(own + 1, page + pages_per_block);
      if (marks.taken[b]) page = end;
      for (; page < end; page++) skipped += row[page];
    }
    lists.skipped[first + h] = skipped;
  }
}

void Selection::tile_shares(const Segment& s, const FoldedQueries& queries, int layer, int kv_head,
                            int tile, float* shares, int thread) {
  const int own = s.first_tile() + tile, group = shape_.group_size();
  const int begin = s.tile_begin(tile) - s.start, end = s.tile_end(tile) - s.start;
  float* masses = scratch_[thread].masses.data();
  bool first = true;
  for (int g = 0; g < group; g++)
    for (int row = begin; row < end; row += kMaxRows, first = false) {
      const int rows = std::min(kMaxRows, end - row);
      int visible[kMaxRows];
      float top[kMaxRows];
      for (int r = 0; r < kMaxRows; r++) visible[r] = s.start + row + r + 1;
      block_masses(s, layer, kv_head, queries.view(s, row, kv_head * group + g, false), rows, own,
                   visible, masses, top, thread);
      add_shares(s, masses, rows, own, first, shares);
    }
  if (s.plan.mass > 0) {
    const float rows = static_cast<float>((end - begin) * group);
    for (int b = 0; b < ceil_div(own + 1, s.plan.block_size / kBlock); b++) shares[b] /= rows;
  }
}

}  // namespace kvsieve
