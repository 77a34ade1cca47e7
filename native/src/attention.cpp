#include "kvsieve/attention.h"

#include <algorithm>

namespace kvsieve {

namespace {

int num_runs(int blocks) { return (blocks + kRunBlocks - 1) / kRunBlocks; }

constexpr float kMinusInfinity = -__builtin_inff();

// Runs of a decoded token that a thread takes at once, at most: 3 of 4 know the run after them.
constexpr int kRunsAtOnce = 4;

}  // namespace

void Attention::prepare(HeadShape shape, const std::vector<Segment>& segments) {
  shape_ = shape;
  int most_blocks = 1;
  bool any_recorded = false;
  size_t recorded = 0, partials = 0;
  importance_at_.resize(segments.size());
  for (size_t i = 0; i < segments.size(); i++) {
    most_blocks = std::max(most_blocks, segments[i].num_blocks());
    importance_at_[i] = recorded;
    if (!segments[i].is_prefill)  // at most, whatever the lists will be
      partials += static_cast<size_t>(num_runs(segments[i].num_blocks())) * shape.num_q_heads;
    if (!segments[i].record_importance) continue;
    any_recorded = true;
    recorded += static_cast<size_t>(segments[i].num_blocks()) * kBlock;
  }
  while (static_cast<int>(every_block_.size()) < most_blocks)
    every_block_.push_back(static_cast<int32_t>(every_block_.size()));
  // Probabilities of a whole tile are kept only while its importance is recorded.
  const size_t runs = any_recorded ? num_runs(most_blocks) : 1;
  const size_t rows = any_recorded ? kBlock : kMaxRows;
  for (Scratch& scratch : scratch_) {
    scratch.logits.reserve(runs * rows * kRunTokens);
    scratch.o.reserve(static_cast<size_t>(kMaxRows) * shape.head_dim);
    scratch.codes.reserve(static_cast<size_t>(kMaxRows) * kMaxScaleGroups * kRunTokens);
    scratch.run_max.reserve(num_runs(most_blocks) * kBlock);
    scratch.importance_run.reserve(kRunTokens);
    if (scratch.importance.size() < recorded) scratch.importance.resize(recorded);
    scratch.took_part = false;
  }
  partials_.reserve(partials * (shape.head_dim + 2));
  kept_.reserve(segments.size() * shape.num_q_heads);
  recorded_tokens_ = recorded;
}

Attention::List Attention::list(const Segment& s, const Lists& lists, int head, int tile) const {
  const int length = lists.length(head, tile);
  if (length >= 0) return {lists.row(head, tile), length};
  const int own = s.is_prefill ? s.first_tile() + tile : s.num_blocks() - 1;
  const int first = shape_.first_block(own);
  return {every_block_.data() + first, own + 1 - first};
}

void Attention::plan(const std::vector<Segment>& segments, const std::vector<Lists>& lists,
                     Scratch& scratch) const {
  scratch.items.clear();
  scratch.merges.clear();
  size_t partial = 0;
  for (int i = 0; i < static_cast<int>(segments.size()); i++) {
    const Segment& s = segments[i];
    if (s.is_prefill) {
      // Later tiles read more: first, so that the last items are small. A group's heads follow each
      // other and find the pages in the cache.
      for (int tile = s.num_tiles() - 1; tile >= 0; tile--)
        for (int head = 0; head < shape_.num_q_heads; head++)
          scratch.items.push_back({i, head, tile, 0, 0, 0});
      continue;
    }
    const int heads = lists[i].heads, per_list = shape_.num_q_heads / heads;
    for (int head = 0; head < heads; head++) {
      const int runs = num_runs(list(s, lists[i], head, 0).length);
      const size_t row_floats = shape_.head_dim + 2, step = row_floats * per_list;
      for (int r = 0; r < per_list; r++)
        scratch.merges.push_back({i, head * per_list + r, runs, partial + r * row_floats, step});
      for (int run = 0; run < runs; run++, partial += step)
        scratch.items.push_back({i, head, 0, run, per_list, partial});
    }
  }
}

// Decode's runs are taken several at a time, so that a thread knows which it computes next and can
// ask for its pages; few enough to share evenly. A prompt's tiles are large: one at a time.
int Attention::items_at_once(const std::vector<Segment>& segments, int64_t count) const {
  for (const Segment& s : segments)
    if (s.is_prefill) return 1;
  const int64_t threads = static_cast<int64_t>(scratch_.size());
  if (count <= kRunsAtOnce * threads) return static_cast<int>((count + threads - 1) / threads);
  return static_cast<int>(std::clamp<int64_t>(count / (2 * threads), 1, kRunsAtOnce));
}

Attention::Run Attention::run_of(const Segment& s, int layer, int kv_head, List blocks, int run) {
  Run found;
  found.blocks = blocks.blocks + run * kRunBlocks;
  found.count = std::min(kRunBlocks, blocks.length - run * kRunBlocks);
  for (int i = 0; i < found.count; i++) found.pages[i] = s.page(layer, kv_head, found.blocks[i]);
  return found;
}

void Attention::attend_decode(const std::vector<Segment>& segments, const std::vector<Lists>& lists,
                              const FoldedQueries& queries, int layer, const Item& item,
                              const Item* next, Scratch& scratch) {
  const Segment& s = segments[item.segment];
  const int d = shape_.head_dim, first_head = item.head * item.rows;
  auto pages_of = [&](const Item& each) {
    const Segment& own = segments[each.segment];
    return run_of(own, layer, each.head * each.rows / shape_.group_size(),
                  list(own, lists[each.segment], each.head, 0), each.run);
  };
  const Run run = pages_of(item);
  Run coming;
  coming.count = 0;
  if (next && segments[next->segment].layout.v == s.layout.v) coming = pages_of(*next);
  int visible[kMaxRows];
  std::fill(visible, visible + kMaxRows, s.end());
  for (int row = 0; row < item.rows; row += kMaxRows) {
    const int rows = std::min(kMaxRows, item.rows - row);
    float m[kMaxRows], sums[kMaxRows];
    kernels_.attend_run({&s.layout, run.pages, run.blocks, run.count, row == 0, coming.pages,
                         row == 0 ? coming.count : 0, queries.view(s, 0, first_head + row, true),
                         rows, visible, scratch.logits.data(), scratch.codes.data(),
                         scratch.o.data(), m, sums, shape_.window});
    for (int r = 0; r < rows; r++) {
      float* at = partials_.data() + item.partial + static_cast<size_t>(row + r) * (d + 2);
      std::copy_n(scratch.o.data() + r * d, d, at);
      at[d] = m[r];
      at[d + 1] = sums[r];
    }
  }
}

float Attention::merge(const Merge& merge, const Lists& lists, float* out) const {
  const int d = shape_.head_dim;
  const float* partial = partials_.data() + merge.partial;
  std::copy_n(partial, d, out);
  float m = partial[d], sum = partial[d + 1];
  for (int run = 1; run < merge.runs; run++) {
    partial += merge.step;
    kernels_.merge(out, &m, &sum, partial, partial[d], partial[d + 1], d);
  }
  kernels_.finish(out, sum, d);
  if (lists.skipped.empty() || lists.length(merge.head * lists.heads / shape_.num_q_heads, 0) < 0)
    return 1.0f;
  const float top = lists.skipped_top[merge.head], common = std::max(m, top);
  const float read = sum * kernels_.exp(m - common);
  return read / (read + lists.skipped[merge.head] * kernels_.exp(top - common));
}

void Attention::count_kept(std::vector<Segment>& segments) const {
  for (size_t i = 0; i < segments.size(); i++) {
    const Segment& s = segments[i];
    if (s.is_prefill || !s.is_sparse || !s.plan.by_shares()) continue;
    const float* kept = kept_.data() + i * shape_.num_q_heads;
    segments[i].kept_mass.emplace_back(kept, kept + shape_.num_q_heads);
  }
}

void Attention::attend_tile(const Segment& s, const Lists& lists, const FoldedQueries& queries,
                            int layer, const Item& item, float* out, Scratch& scratch) {
  const int d = shape_.head_dim, kv_head = item.head / shape_.group_size();
  const int list_head = lists.heads == shape_.num_q_heads ? item.head : kv_head;
  const List blocks = list(s, lists, list_head, item.tile);
  const int begin = s.tile_begin(item.tile) - s.start, end = s.tile_end(item.tile) - s.start;
  const int tile_rows = end - begin;
  const size_t stride = static_cast<size_t>(shape_.num_q_heads) * d;
  float* tile_out = out + (static_cast<size_t>(s.first_row) + begin) * stride + item.head * d;
  float m[kBlock], sums[kBlock] = {};
  std::fill(m, m + kBlock, kMinusInfinity);
  for (int run = 0; run < num_runs(blocks.length); run++) {
    const Run pages = run_of(s, layer, kv_head, blocks, run);
    for (int row = 0; row < tile_rows; row += kMaxRows) {
      const int rows = std::min(kMaxRows, tile_rows - row);
      int visible[kMaxRows];
      for (int r = 0; r < rows; r++) visible[r] = s.start + begin + row + r + 1;
      const size_t kept = static_cast<size_t>(run) * kBlock + row;
      float* logits = scratch.logits.data() + (s.record_importance ? kept * kRunTokens : 0);
      float run_max[kMaxRows], run_sum[kMaxRows];
      kernels_.attend_run({&s.layout, pages.pages, pages.blocks, pages.count, false, nullptr, 0,
                           queries.view(s, begin + row, item.head, false), rows, visible, logits,
                           scratch.codes.data(), scratch.o.data(), run_max, run_sum,
                           shape_.window});
      for (int r = 0; r < rows; r++) {
        kernels_.merge(tile_out + (row + r) * stride, &m[row + r], &sums[row + r],
                       scratch.o.data() + r * d, run_max[r], run_sum[r], d);
        scratch.run_max.data()[kept + r] = run_max[r];
      }
    }
  }
  for (int r = 0; r < tile_rows; r++) kernels_.finish(tile_out + r * stride, sums[r], d);
  if (s.record_importance)
    record_importance(blocks, tile_rows, m, sums,
                      scratch.importance.data() + importance_at_[item.segment], scratch);
}

void Attention::record_importance(List blocks, int rows, const float* m, const float* sums,
                                  int64_t* importance, Scratch& scratch) const {
  for (int run = 0; run < num_runs(blocks.length); run++) {
    const int count = std::min(kRunBlocks, blocks.length - run * kRunBlocks);
    int32_t* tokens = scratch.importance_run.data();
    std::fill_n(tokens, count * kBlock, 0);  // at most 32 rows of at most 2^24: fits 32 bits
    for (int r = 0; r < rows; r++) {
      const size_t kept = static_cast<size_t>(run) * kBlock + r;
      const float run_max = scratch.run_max.data()[kept];
      if (run_max == kMinusInfinity) continue;
      kernels_.add_importance(scratch.logits.data() + kept * kRunTokens,
                              kernels_.exp(run_max - m[r]) / sums[r], count * kBlock, tokens);
    }
    for (int i = 0; i < count; i++) {
      int64_t* at = importance + static_cast<size_t>(blocks.blocks[run * kRunBlocks + i]) * kBlock;
      for (int t = 0; t < kBlock; t++) at[t] += tokens[i * kBlock + t];
    }
  }
}

void Attention::run(Worker& worker, const std::vector<Segment>& segments,
                    const std::vector<Lists>& lists, const FoldedQueries& queries, int layer,
                    float* out) {
  Scratch& scratch = scratch_[worker.id()];
  plan(segments, lists, scratch);
  const std::vector<Item>& items = scratch.items;
  const int64_t count = static_cast<int64_t>(items.size());
  const int grain = items_at_once(segments, count);
  worker.share(count, grain, [&](int64_t i) {
    const Item& item = items[i];
    const Segment& s = segments[item.segment];
    if (!scratch.took_part) {
      std::fill_n(scratch.importance.begin(), recorded_tokens_, 0);
      scratch.took_part = true;
    }
    if (s.is_prefill) {
      attend_tile(s, lists[item.segment], queries, layer, item, out, scratch);
    } else {
      const bool is_last = (i + 1) % grain == 0 || i + 1 == count;
      attend_decode(segments, lists, queries, layer, item, is_last ? nullptr : &item + 1, scratch);
    }
  });
  const size_t stride = static_cast<size_t>(shape_.num_q_heads) * shape_.head_dim;
  if (!scratch.merges.empty())
    worker.share(static_cast<int64_t>(scratch.merges.size()), 1, [&](int64_t i) {
      const Merge& each = scratch.merges[i];
      kept_.data()[each.segment * shape_.num_q_heads + each.head] =
          merge(each, lists[each.segment],
                out + segments[each.segment].first_row * stride + each.head * shape_.head_dim);
    });
  for (size_t i = 0; i < segments.size(); i++) {
    const Segment& s = segments[i];
    if (!s.record_importance) continue;
    // Integer sums: the order of threads cannot matter. A thread that came late has none.
    worker.share(s.end(), 1024, [&](int64_t token) {
      for (const Scratch& scratch : scratch_)
        if (scratch.took_part)
          s.importance[layer * s.importance_tokens + token] +=
              scratch.importance[importance_at_[i] + token];
    });
  }
}

}  // namespace kvsieve
