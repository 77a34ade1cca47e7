#include "kvsieve/selection.h"

#include <algorithm>
#include <cstring>

#include "kvsieve/select.h"

namespace kvsieve {

namespace {

int ceil_div(int a, int b) { return (a + b - 1) / b; }

}  // namespace

int Selection::score_stride(const Segment& s) {
  return ceil_div(ceil_div(s.end(), s.plan.block_size), kIndexLanes) * kIndexLanes;
}

bool Selection::decode_is_sparse(const Segment& s) const {
  return s.is_sparse && !s.is_prefill && s.end() > 2 * kBlock &&
         ceil_div(s.end(), s.plan.block_size) > s.plan.k;
}

bool Selection::tile_is_sparse(const Segment& s, int tile) const {
  const int block = s.first_tile() + tile;
  return s.is_sparse && s.is_prefill && block >= 2 && block < s.plan.exact_from_tile &&
         block * kBlock / s.plan.block_size + 1 > s.plan.k;
}

void Selection::prepare(HeadShape shape, const std::vector<Segment>& segments) {
  shape_ = shape;
  lists_.resize(segments.size());
  importance_at_.resize(segments.size());
  size_t sums = 0;
  int stride = 0;
  for (size_t i = 0; i < segments.size(); i++) {
    const Segment& s = segments[i];
    const bool per_head = !s.is_prefill && s.is_sparse && !s.plan.share_group && !shape.window;
    const int pages_per_block = s.plan.block_size / kBlock;
    const int capacity =
        s.is_sparse ? std::min<int64_t>(s.num_blocks(), int64_t{s.plan.k} * pages_per_block) : 0;
    lists_[i].reset(per_head ? shape.num_q_heads : shape.num_kv_heads, s.num_tiles(), capacity);
    importance_at_[i] = sums;
    if (!s.is_sparse) continue;
    stride = std::max(stride, score_stride(s));
    sums += score_stride(s);
  }
  importance_.reserve(sums);
  for (Scratch& scratch : scratch_) {
    scratch.page_logits.reserve(kMaxRows * kBlock);
    scratch.scores.reserve(static_cast<size_t>(kMaxRows) * stride);
    scratch.merged.reserve(stride);
    scratch.taken.reserve(stride);
    scratch.order.reserve(stride);
  }
}

void Selection::score_from_pages(const Segment& s, int layer, int kv_head, const Queries& q,
                                 int rows, int block, int n, float* out, int stride,
                                 Scratch& scratch) {
  const int begin = block * s.plan.block_size, end = std::min(begin + s.plan.block_size, n);
  const int step = std::max(1, (end - begin) / s.plan.num_probes);
  float* logits = scratch.page_logits.data();
  for (int r = 0; r < rows; r++) out[r * stride + block] = -__builtin_inff();
  for (int position = begin, loaded = -1; position < end; position += step) {
    if (position / kBlock != loaded) {
      loaded = position / kBlock;
      kernels_.page_logits(s.layout, s.page(layer, kv_head, loaded), q, rows, logits, kBlock);
    }
    for (int r = 0; r < rows; r++) {
      float& best = out[r * stride + block];
      best = std::max(best, logits[r * kBlock + position % kBlock]);
    }
  }
}

void Selection::score(const Segment& s, int layer, int kv_head, const Queries& q, int rows, int n,
                      float* out, int stride, int thread) {
  const int blocks = ceil_div(n, s.plan.block_size);
  int block = 0;
  if (s.index) {
    const int full = n / s.plan.block_size;
    for (; block < full; block += kIndexLanes)
      kernels_.index_scores(s.index_record(layer, kv_head, block / kIndexLanes), s.index_entries,
                            shape_.head_dim, q, rows, out + block, stride);
    block = full;  // lanes behind it hold keys of open or future blocks
  }
  for (; block < blocks; block++)
    score_from_pages(s, layer, kv_head, q, rows, block, n, out, stride, scratch_[thread]);
}

void Selection::store_list(const Segment& s, const uint8_t* taken, int num_blocks, int head,
                           int tile, Lists& lists) {
  const int pages_per_block = s.plan.block_size / kBlock;
  int32_t* list = lists.row(head, tile);
  int length = 0;
  for (int page = 0; page < num_blocks; page++)
    if (taken[page / pages_per_block]) list[length++] = page;
  lists.length(head, tile) = length;
}

void Selection::select_decode(const Segment& s, const FoldedQueries& queries, int layer, int head,
                              const int64_t* importance, Lists& lists, int thread) {
  Scratch& scratch = scratch_[thread];
  const int n = s.end(), blocks = ceil_div(n, s.plan.block_size), stride = score_stride(s);
  const bool shared = s.plan.share_group;
  const int group = shape_.group_size(), kv_head = shared ? head : head / group;
  const int first = shared ? head * group : head, heads = shared ? group : 1;
  // The open block's score comes from other keys, so it does not set a head's maximum.
  const int counted = std::max(1, n / s.plan.block_size);
  float* scores = scratch.scores.data();
  for (int h = 0; h < heads; h += kMaxRows) {
    const int rows = std::min(kMaxRows, heads - h);
    score(s, layer, kv_head, queries.view(s, 0, first + h, true), rows, n, scores, stride, thread);
    for (int r = 0; shared && r < rows; r++)
      merge_row(scores + r * stride, blocks, counted, h + r == 0, scratch.merged.data());
  }
  const float* merged = shared ? scratch.merged.data() : scores;
  PickScratch pick{scratch.taken.data(), scratch.order.data()};
  if (s.plan.probe)
    pick_probe(merged, importance, blocks, s.plan.k, pick);
  else
    pick_guarded(merged, blocks, s.plan.k, false, pick);
  store_list(s, pick.taken, s.num_blocks(), head, 0, lists);
}

void Selection::select_tile(const Segment& s, const FoldedQueries& queries, int layer, int kv_head,
                            int tile, Lists& lists, int thread) {
  Scratch& scratch = scratch_[thread];
  const int page = s.first_tile() + tile, pages_per_block = s.plan.block_size / kBlock;
  const int diagonal = page / pages_per_block, stride = score_stride(s);
  const int begin = s.tile_begin(tile) - s.start, end = s.tile_end(tile) - s.start;
  float* scores = scratch.scores.data();
  float* merged = scratch.merged.data();
  bool first = true;
  for (int g = 0; g < shape_.group_size(); g++)
    for (int row = begin; row < end; row += kMaxRows) {
      const int rows = std::min(kMaxRows, end - row);
      const Queries q = queries.view(s, row, kv_head * shape_.group_size() + g, false);
      score(s, layer, kv_head, q, rows, diagonal * s.plan.block_size, scores, stride, thread);
      for (int r = 0; r < rows; r++, first = false)
        merge_row(scores + r * stride, diagonal, diagonal, first, merged);
    }
  merged[diagonal] = 0;  // always taken, whatever its score
  PickScratch pick{scratch.taken.data(), scratch.order.data()};
  pick_guarded(merged, diagonal + 1, s.plan.k, true, pick);
  store_list(s, pick.taken, page + 1, kv_head, tile, lists);
}

void Selection::run(Worker& worker, const std::vector<Segment>& segments,
                    const FoldedQueries& queries, int layer) {
  if (shape_.window) return;  // a window is read exactly, whatever the plan
  for (size_t i = 0; i < segments.size(); i++) {
    const Segment& s = segments[i];
    Lists& lists = lists_[i];
    if (!s.is_sparse || (!s.is_prefill && !decode_is_sparse(s))) continue;
    if (s.is_prefill) {
      worker.share(static_cast<int64_t>(lists.tiles) * lists.heads, 1, [&](int64_t item) {
        const int tile = lists.tiles - 1 - static_cast<int>(item) / lists.heads;  // longest first
        if (tile_is_sparse(s, tile))
          select_tile(s, queries, layer, static_cast<int>(item) % lists.heads, tile, lists,
                      worker.id());
      });
      continue;
    }
    int64_t* sums = nullptr;
    if (s.plan.probe && s.importance) {
      sums = importance_.data() + importance_at_[i];
      const int64_t* tokens = s.importance + layer * s.importance_tokens;
      const int size = s.plan.block_size;
      worker.share(ceil_div(s.end(), size), 64, [&](int64_t block) {
        const int64_t begin = block * size, end = std::min<int64_t>(begin + size, s.end());
        sums[block] = 0;
        for (int64_t t = begin; t < end; t++) sums[block] += tokens[t];
      });
    }
    worker.share(lists.heads, 1, [&](int64_t head) {
      select_decode(s, queries, layer, static_cast<int>(head), sums, lists, worker.id());
    });
  }
}

void Selection::count_pairs(std::vector<Segment>& segments) {
  for (size_t i = 0; i < segments.size(); i++) {
    Segment& s = segments[i];
    const Lists& lists = lists_[i];
    const int lists_per_head = lists.heads / shape_.num_kv_heads;
    read_.resize(s.num_blocks());
    for (int tile = 0; tile < s.num_tiles(); tile++) {
      const int rows = s.is_prefill ? s.tile_end(tile) - s.tile_begin(tile) : 1;
      const int own = s.is_prefill ? s.first_tile() + tile : s.num_blocks() - 1;
      const int causal = own + 1 - shape_.first_block(own);
      for (int head = 0; head < shape_.num_kv_heads; head++) {
        s.pairs_causal += static_cast<int64_t>(rows) * causal;
        if (lists.length(head * lists_per_head, tile) < 0) {
          s.pairs_attended += static_cast<int64_t>(rows) * causal;
          continue;
        }
        std::fill(read_.begin(), read_.end(), 0);
        for (int l = head * lists_per_head; l < (head + 1) * lists_per_head; l++)
          for (int b = 0; b < lists.length(l, tile); b++) read_[lists.row(l, tile)[b]] = 1;
        s.pairs_attended += rows * std::count(read_.begin(), read_.end(), 1);
      }
    }
  }
}

}  // namespace kvsieve
