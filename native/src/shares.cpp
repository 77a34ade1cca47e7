// Selection by shares of the attention: what is particular to selectors `anchors` and `oracle`.
#include <algorithm>

#include "kvsieve/selection.h"

namespace kvsieve {

namespace {

int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Most by which the masses of blocks that were not refined are scaled.
constexpr float kMaxCorrection = 16;

// Chosen pages lie apart, which the processor's own prefetch does not follow.
constexpr int kPagesAhead = 4;
// Candidates whose logits a thread computes at once.
constexpr int kChunkPages = 16;
void ask_for_keys(const Segment& s, int layer, int kv_head, int block) {
  const uint8_t* page = s.page(layer, kv_head, block);
  for (size_t at = 0; at < s.layout.v; at += 64) __builtin_prefetch(page + at, 0, 2);
}

Queries row_of(Queries q, int row) {
  q.values += static_cast<ptrdiff_t>(row) * q.stride;
  q.codes += static_cast<ptrdiff_t>(row) * q.stride;
  q.scale += static_cast<ptrdiff_t>(row) * q.scale_stride;
  q.codes_sum += static_cast<ptrdiff_t>(row) * q.sum_stride;
  return q;
}

}  // namespace

void Selection::ByShares::reserve(int heads, int room, int most_pages) {
  stride = room;
  refined = most_pages;
  if (refined == 0) return;  // no decoded token is among the segments
  masses.reserve(static_cast<size_t>(heads) * stride);
  shares.reserve(static_cast<size_t>(heads) * stride);
  taken.reserve(static_cast<size_t>(heads) * stride);
  pages.reserve(static_cast<size_t>(heads) * refined);
  logits.reserve(static_cast<size_t>(heads) * refined * kBlock);
  num_pages.resize(heads);
}

void Selection::block_masses(const Segment& s, int layer, int kv_head, const Queries& q, int rows,
                             int own, const int* visible, float* masses, int stride, float* top,
                             int thread) {
  if (s.plan.selector == Selector::oracle || own == 0)  // an only block counts exactly
    true_masses(s, layer, kv_head, q, rows, own, visible, masses, stride, top, thread);
  else
    anchors_.estimate(s, layer, kv_head, q, rows, own, visible, masses, stride, top, thread);
}

void Selection::add_shares(const Segment& s, const float* masses, int stride, int rows, int own,
                           bool first, float* shares) const {
  const int pages_per_block = s.plan.block_size / kBlock;
  const int count = ceil_div(own + 1, pages_per_block);
  // Under a mass budget the sum, for a mean: shares of all rows' attention must add up to 1.
  const bool add = s.plan.mass > 0;
  if (first) std::fill_n(shares, ceil_div(count, kIndexLanes) * kIndexLanes, 0.0f);
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
    block_masses(s, layer, kv_head, row_of(q, r), 1, own, &n, masses, Anchors::stride(s), &top,
                 thread);
    add_shares(s, masses, Anchors::stride(s), 1, own, true, out + r * stride);
  }
}

template <class Use>
void Selection::each_rows(const Segment& s, const FoldedQueries& queries, int first, int heads,
                          const Use& use) const {
  for (int h = 0; h < heads; h += kMaxRows)
    use(queries.view(s, 0, first + h, true), std::min(kMaxRows, heads - h), h);
}

void Selection::name_candidates(const Segment& s, const FoldedQueries& queries, int layer, int list,
                                Lists& lists, int thread) {
  const int own = s.num_blocks() - 1, indexed = own - 1, stride = by_shares_.stride;
  const int heads = shape_.num_q_heads / lists.heads, first = list * heads;
  const int pages_per_block = s.plan.block_size / kBlock,
            count = ceil_div(own + 1, pages_per_block);
  float* masses = by_shares_.masses.data() + static_cast<ptrdiff_t>(first) * stride;
  float* shares = by_shares_.shares.data() + static_cast<ptrdiff_t>(list) * stride;
  uint8_t* taken = by_shares_.taken.data() + static_cast<ptrdiff_t>(list) * stride;
  int visible[kMaxRows];
  std::fill_n(visible, kMaxRows, s.end());
  each_rows(s, queries, first, heads, [&](const Queries& q, int rows, int h) {
    float* found = masses + static_cast<ptrdiff_t>(h) * stride;
    block_masses(s, layer, first / shape_.group_size(), q, rows, own, visible, found, stride,
                 &lists.skipped_top[first + h], thread);
    add_shares(s, found, stride, rows, own, h == 0, shares);
  });
  by_shares_.num_pages[list] = 0;
  if (s.plan.selector != Selector::anchors) {  // every mass is true already
    std::fill_n(taken, count, uint8_t{1});
    return;
  }
  pick_candidates(shares, count, num_refined(s.plan.k), kRefineMargin,
                  {taken, scratch_[thread].order.data()});
  int32_t* page = by_shares_.pages.data() + static_cast<ptrdiff_t>(list) * by_shares_.refined;
  int pages = 0;
  for (int b = 0, next = 0; next < indexed; b++) {
    const int end = std::min(indexed, next + pages_per_block);
    if (!taken[b]) next = end;
    for (; next < end; next++) page[pages++] = next;
  }
  by_shares_.num_pages[list] = pages;
}

void Selection::candidate_logits(const Segment& s, const FoldedQueries& queries, int layer,
                                 int list, int chunk) {
  const int heads = s.plan.share_group ? shape_.group_size() : 1, first = list * heads;
  const int kv_head = first / shape_.group_size(), row_stride = by_shares_.refined * kBlock;
  const int32_t* page = by_shares_.pages.data() + static_cast<ptrdiff_t>(list) * by_shares_.refined;
  const int begin = chunk * kChunkPages;
  const int end = std::min(by_shares_.num_pages[list], begin + kChunkPages);
  for (int i = begin; i < std::min(begin + kPagesAhead, end); i++)
    ask_for_keys(s, layer, kv_head, page[i]);
  for (int i = begin; i < end; i++) {
    if (i + kPagesAhead < end) ask_for_keys(s, layer, kv_head, page[i + kPagesAhead]);
    each_rows(s, queries, first, heads, [&](const Queries& q, int rows, int h) {
      float* out = by_shares_.logits.data() + static_cast<ptrdiff_t>(first + h) * row_stride;
      kernels_.page_logits(s.layout, s.page(layer, kv_head, page[i]), q, rows, out + i * kBlock,
                           row_stride);
    });
  }
}

void Selection::correct_masses(const Segment& s, int list, Lists& lists, int thread) {
  const int own = s.num_blocks() - 1, indexed = own - 1, stride = by_shares_.stride;
  const int heads = shape_.num_q_heads / lists.heads, pages = by_shares_.num_pages[list];
  const int pages_per_block = s.plan.block_size / kBlock;
  const int32_t* page = by_shares_.pages.data() + static_cast<ptrdiff_t>(list) * by_shares_.refined;
  const uint8_t* taken = by_shares_.taken.data() + static_cast<ptrdiff_t>(list) * stride;
  float* exact = scratch_[thread].exact.data();
  for (int head = list * heads; head < (list + 1) * heads; head++) {
    float* mass = by_shares_.masses.data() + static_cast<ptrdiff_t>(head) * stride;
    const float* logits =
        by_shares_.logits.data() + static_cast<ptrdiff_t>(head) * by_shares_.refined * kBlock;
    const float estimated_top = lists.skipped_top[head];
    const float top = kernels_.exact_masses(logits, pages, estimated_top, exact);
    lists.skipped_top[head] = top;
    const float unit = kernels_.exp(estimated_top - top);
    for (int b = 0; b <= own; b++) mass[b] *= unit;
    float guess = 0, truth = 0;
    for (int i = 0; i < pages; i++)
      if (taken[page[i] / pages_per_block] == 1) guess += mass[page[i]], truth += exact[i];
    const float scale = guess > 0 ? std::min(truth / guess, kMaxCorrection) : 1.0f;
    for (int b = 0; b < indexed; b++) mass[b] *= scale;
    for (int i = 0; i < pages; i++) mass[page[i]] = exact[i];
  }
}

void Selection::choose_by_shares(const Segment& s, int list, Lists& lists, int thread) {
  const int own = s.num_blocks() - 1, stride = by_shares_.stride;
  const int heads = shape_.num_q_heads / lists.heads, first = list * heads;
  const int pages_per_block = s.plan.block_size / kBlock,
            count = ceil_div(own + 1, pages_per_block);
  const float* masses = by_shares_.masses.data() + static_cast<ptrdiff_t>(first) * stride;
  float* shares = by_shares_.shares.data() + static_cast<ptrdiff_t>(list) * stride;
  PickScratch marks{by_shares_.taken.data() + static_cast<ptrdiff_t>(list) * stride,
                    scratch_[thread].order.data()};
  if (s.plan.selector == Selector::anchors) {
    correct_masses(s, list, lists, thread);
    add_shares(s, masses, stride, heads, own, true, shares);
  }
  for (int b = 0; b < count; b++) {
    if (!marks.taken[b])
      shares[b] = -__builtin_inff();  // nobody looked at its keys
    else if (s.plan.mass > 0)
      shares[b] /= static_cast<float>(heads);
  }
  pick(s, shares, count, nullptr, marks);
  store_list(s, marks.taken, s.num_blocks(), list, 0, lists);
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

void Selection::select_by_shares(Worker& worker, const Segment& s, const FoldedQueries& queries,
                                 int layer, Lists& lists) {
  worker.share(lists.heads, 1, [&](int64_t list) {
    name_candidates(s, queries, layer, static_cast<int>(list), lists, worker.id());
  });
  if (s.plan.selector == Selector::anchors) {
    const int chunks = ceil_div(by_shares_.refined, kChunkPages);
    worker.share(static_cast<int64_t>(lists.heads) * chunks, 1, [&](int64_t item) {
      candidate_logits(s, queries, layer, static_cast<int>(item) / chunks,
                       static_cast<int>(item) % chunks);
    });
  }
  worker.share(lists.heads, 1, [&](int64_t list) {
    choose_by_shares(s, static_cast<int>(list), lists, worker.id());
  });
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
                   visible, masses, Anchors::stride(s), top, thread);
      add_shares(s, masses, Anchors::stride(s), rows, own, first, shares);
    }
  if (s.plan.mass > 0) {
    const float rows = static_cast<float>((end - begin) * group);
    for (int b = 0; b < ceil_div(own + 1, s.plan.block_size / kBlock); b++) shares[b] /= rows;
  }
}

}  // namespace kvsieve
