#include "kvsieve/selection.h"

#include <algorithm>
#include <cstring>

#include "kvsieve/select.h"

namespace kvsieve {

namespace {

int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Groups of the index that a thread scores at once, few enough to share a context of 2,000 tokens,
// and how far ahead it asks for one: scoring a group takes some 150 ns (8.5 KiB at head_dim 64), a
// quarter of that on the first of two levels, and memory answers after 100 to 200.
struct Ahead {
  int at_once, groups;
};
constexpr Ahead kAllKeys{4, 1}, kCoarseKeys{16, 4};

// Of a full block's sampled keys, the first level compares every so-many-th.
int coarse_step(int entries) { return std::max(1, entries / 2); }

bool has_two_levels(const Segment& s) {
  return s.plan.selector == Selector::even &&
         ceil_div(s.end() / s.plan.block_size, kIndexLanes) > num_candidates(s.plan.k);
}

// A context of up to so many blocks is read whole.
int smallest_budget(const Plan& plan) { return plan.mass > 0 ? plan.k_min : plan.k; }

}  // namespace

int Selection::score_stride(const Segment& s) {
  return ceil_div(ceil_div(s.end(), s.plan.block_size), kIndexLanes) * kIndexLanes;
}

bool Selection::decode_is_sparse(const Segment& s) const {
  return s.is_sparse && !s.is_prefill && s.end() > 2 * kBlock &&
         ceil_div(s.end(), s.plan.block_size) > smallest_budget(s.plan);
}

bool Selection::tile_is_sparse(const Segment& s, int tile) const {
  const int block = s.first_tile() + tile;
  return s.is_sparse && s.is_prefill && block >= 2 && block < s.plan.exact_from_tile &&
         block * kBlock / s.plan.block_size + 1 > smallest_budget(s.plan);
}

void Selection::prepare(HeadShape shape, const std::vector<Segment>& segments) {
  shape_ = shape;
  anchors_.prepare(shape, segments);
  vectors_.prepare(shape);
  lists_.resize(segments.size());
  importance_at_.resize(segments.size());
  scores_at_.resize(segments.size());
  candidates_at_.resize(segments.size());
  size_t sums = 0, scores = 0, candidates = 0;
  int stride = 0, pages = 0, refined = 0, tokens = 0;
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
    if (s.plan.by_shares()) {
      const bool all = s.plan.selector == Selector::oracle;
      tokens = std::max(tokens, all ? s.num_blocks() * kBlock : kBlock);
      pages = std::max(pages, Anchors::stride(s));
      if (!s.is_prefill) {
        refined = std::max<int>(
            refined, std::min<int64_t>(pages, int64_t{num_refined(s.plan.k)} * pages_per_block));
        lists_[i].skipped.resize(shape.num_q_heads);
        lists_[i].skipped_top.resize(shape.num_q_heads);
      }
    }
    sums += score_stride(s);
    scores_at_[i] = scores;
    candidates_at_[i] = candidates;
    if (!decode_is_sparse(s)) continue;
    scores += static_cast<size_t>(shape.num_q_heads) * score_stride(s);
    if (has_two_levels(s))
      candidates += static_cast<size_t>(lists_[i].heads) * num_candidates(s.plan.k);
  }
  by_shares_.reserve(shape.num_q_heads, pages, refined);
  importance_.reserve(sums);
  scores_.reserve(scores);
  candidates_.reserve(candidates);
  for (Scratch& scratch : scratch_) {
    scratch.page_logits.reserve(kMaxRows * kBlock);
    scratch.exact.reserve(refined);
    scratch.scores.reserve(static_cast<size_t>(kMaxRows) * stride);
    scratch.merged.reserve(stride);
    scratch.masses.reserve(static_cast<size_t>(kMaxRows) * pages);
    scratch.all_logits.reserve(static_cast<size_t>(kMaxRows) * tokens);
    scratch.taken.reserve(stride);
    scratch.order.reserve(stride);
  }
}

void Selection::score_from_pages(const Scoring& scoring, int block, Keys keys,
                                 Scratch& scratch) const {
  const Segment& s = scoring.segment;
  const int size = s.plan.block_size;
  const int begin = block * size, end = std::min(begin + size, scoring.n);
  int step = std::max(1, (end - begin) / s.plan.num_probes);
  if (keys == Keys::coarse && end - begin == size) step *= coarse_step(ceil_div(size, step));
  float* logits = scratch.page_logits.data();
  float* out = scoring.out + block;
  for (int r = 0; r < scoring.rows; r++) out[r * scoring.stride] = -__builtin_inff();
  for (int position = begin, loaded = -1; position < end; position += step) {
    if (position / kBlock != loaded) {
      loaded = position / kBlock;
      kernels_.page_logits(s.layout, s.page(scoring.layer, scoring.kv_head, loaded), scoring.q,
                           scoring.rows, logits, kBlock);
    }
    for (int r = 0; r < scoring.rows; r++) {
      float& best = out[r * scoring.stride];
      best = std::max(best, logits[r * kBlock + position % kBlock]);
    }
  }
}

void Selection::score_group(const Scoring& scoring, int group, int ahead, Keys keys,
                            Scratch& scratch) const {
  const Segment& s = scoring.segment;
  const int blocks = ceil_div(scoring.n, s.plan.block_size), full = scoring.n / s.plan.block_size;
  int block = group * kIndexLanes;
  const int end = std::min(block + kIndexLanes, blocks);
  if (s.plan.by_vectors())
    return vectors_.score(s, scoring.layer, scoring.kv_head, scoring.q, scoring.vectors,
                          scoring.rows, scoring.n, group, ahead, scoring.out, scoring.stride);
  if (s.index_is_strided() && block < full) {
    kernels_.index_scores(
        s.index_record(scoring.layer, scoring.kv_head, group),
        ahead < 0 ? nullptr : s.index_record(scoring.layer, scoring.kv_head, ahead),
        s.index_entries, keys == Keys::coarse ? coarse_step(s.index_entries) : 1, shape_.head_dim,
        scoring.q, scoring.rows, scoring.out + block, scoring.stride);
    block = full;  // lanes behind it hold keys of open or future blocks
  }
  for (; block < end; block++) score_from_pages(scoring, block, keys, scratch);
}

void Selection::score(const Segment& s, int layer, int kv_head, const Queries& q, int rows, int n,
                      float* out, int stride, int thread) {
  if (s.plan.by_shares()) return score_shares(s, layer, kv_head, q, rows, out, stride, thread);
  const Scoring all = scoring(s, layer, kv_head, q, rows, n, out, stride, thread);
  const int groups = ceil_div(ceil_div(n, s.plan.block_size), kIndexLanes);
  for (int group = 0; group < groups; group++)
    score_group(all, group, -1, Keys::all, scratch_[thread]);
}

Selection::Scoring Selection::scoring(const Segment& s, int layer, int kv_head, const Queries& q,
                                      int rows, int n, float* out, int stride, int thread) {
  Scoring result{s, layer, kv_head, q, rows, n, out, stride, {}};
  if (s.plan.by_vectors()) result.vectors = vectors_.fold(s, q, rows, thread);
  return result;
}

template <class Use>
void Selection::each_scoring(size_t segment, const Segment& s, const FoldedQueries& queries,
                             int layer, int head, int thread, const Use& use) {
  const int group = shape_.group_size(), stride = score_stride(s);
  const int first = s.plan.share_group ? head * group : head;
  const int heads = s.plan.share_group ? group : 1;
  for (int h = first; h < first + heads; h += kMaxRows) {
    float* out = scores_.data() + scores_at_[segment] + static_cast<size_t>(h) * stride;
    const int rows = std::min(kMaxRows, first + heads - h);
    use(scoring(s, layer, h / group, queries.view(s, 0, h, true), rows, s.end(), out, stride,
                thread));
  }
}

template <class At>
void Selection::score_groups(size_t segment, const Segment& s, const FoldedQueries& queries,
                             int layer, int head, int count, const At& at, Keys keys, int thread) {
  each_scoring(segment, s, queries, layer, head, thread, [&](const Scoring& scoring) {
    const int ahead = keys == Keys::coarse ? kCoarseKeys.groups : kAllKeys.groups;
    for (int i = 0; i < count; i++)
      score_group(scoring, at(i), i + ahead < count ? at(i + ahead) : -1, keys, scratch_[thread]);
  });
}

// Scores every block of a decoded token, or on two levels (docs/selection.md, 4): all blocks by a
// few keys, then the candidates by all of theirs.
void Selection::score_decode(Worker& worker, size_t segment, const Segment& s,
                             const FoldedQueries& queries, int layer, int heads) {
  const bool two_levels = has_two_levels(s);
  const int groups = score_stride(s) / kIndexLanes;
  const int at_once = two_levels ? kCoarseKeys.at_once : kAllKeys.at_once;
  const int chunks = ceil_div(groups, at_once);
  worker.share(static_cast<int64_t>(heads) * chunks, 1, [&](int64_t item) {
    const int begin = static_cast<int>(item) % chunks * at_once;
    score_groups(
        segment, s, queries, layer, static_cast<int>(item) / chunks,
        std::min(at_once, groups - begin), [&](int i) { return begin + i; },
        two_levels ? Keys::coarse : Keys::all, worker.id());
  });
  if (!two_levels) return;
  worker.share(heads, 1, [&](int64_t head) {
    choose_candidates(segment, s, static_cast<int>(head), worker.id());
  });
  const int wanted = num_candidates(s.plan.k), parts = ceil_div(wanted, kAllKeys.at_once);
  worker.share(static_cast<int64_t>(heads) * parts, 1, [&](int64_t item) {
    const int head = static_cast<int>(item) / parts;
    const int begin = static_cast<int>(item) % parts * kAllKeys.at_once;
    const int32_t* chosen = candidates_.data() + candidates_at_[segment] + head * wanted + begin;
    score_groups(
        segment, s, queries, layer, head, std::min(kAllKeys.at_once, wanted - begin),
        [&](int i) { return chosen[i]; }, Keys::all, worker.id());
  });
}

// Keeps the super-blocks that a list's heads are scored in, and sets the scores of all others'
// full blocks to -inf.
void Selection::choose_candidates(size_t segment, const Segment& s, int head, int thread) {
  Scratch& scratch = scratch_[thread];
  const int full = s.end() / s.plan.block_size, groups = ceil_div(full, kIndexLanes);
  const int stride = score_stride(s), wanted = num_candidates(s.plan.k);
  const int heads = s.plan.share_group ? shape_.group_size() : 1;
  float* scores = scores_.data() + scores_at_[segment] + static_cast<size_t>(head) * heads * stride;
  float *best = scratch.scores.data(), *merged = scratch.merged.data();
  for (int h = 0; h < heads; h++) {
    for (int group = 0; group < groups; group++) {
      const float* own = scores + static_cast<size_t>(h) * stride + group * kIndexLanes;
      best[group] = *std::max_element(own, own + std::min(kIndexLanes, full - group * kIndexLanes));
    }
    merge_row(best, groups, groups, h == 0, merged);
  }
  PickScratch pick{scratch.taken.data(), scratch.order.data()};
  pick_ends(merged, groups, wanted, pick);
  int32_t* chosen = candidates_.data() + candidates_at_[segment] + head * wanted;
  for (int group = 0; group < groups; group++) {
    if (pick.taken[group]) {
      *chosen++ = group;
      continue;
    }
    for (int h = 0; h < heads; h++)
      std::fill_n(scores + static_cast<size_t>(h) * stride + group * kIndexLanes, kIndexLanes,
                  -__builtin_inff());
  }
}

void Selection::store_list(const Segment& s, const uint8_t* taken, int num_blocks, int head,
                           int tile, Lists& lists) {
  const int pages_per_block = s.plan.block_size / kBlock;
  int32_t* list = lists.row(head, tile);
  int length = 0;
  for (int b = 0, page = 0; page < num_blocks; b++) {
    const int end = std::min(num_blocks, page + pages_per_block);
    if (!taken[b]) page = end;
    for (; page < end; page++) list[length++] = page;
  }
  lists.length(head, tile) = length;
}

void Selection::select_decode(size_t segment, const Segment& s, int head, const int64_t* importance,
                              Lists& lists, int thread) {
  Scratch& scratch = scratch_[thread];
  const int n = s.end(), blocks = ceil_div(n, s.plan.block_size), stride = score_stride(s);
  const int heads = s.plan.share_group ? shape_.group_size() : 1;
  const float* scores =
      scores_.data() + scores_at_[segment] + static_cast<size_t>(head) * heads * stride;
  if (s.plan.share_group) {
    // The open block's score comes from other keys, so it does not set a head's maximum.
    const int counted = std::max(1, n / s.plan.block_size);
    float* merged = scratch.merged.data();
    for (int h = 0; h < heads; h++)
      merge_row(scores + static_cast<size_t>(h) * stride, blocks, counted, h == 0, merged);
    scores = merged;
  }
  PickScratch marks{scratch.taken.data(), scratch.order.data()};
  pick(s, scores, blocks, importance, marks);
  store_list(s, marks.taken, s.num_blocks(), head, 0, lists);
}

void Selection::pick(const Segment& s, const float* scores, int count, const int64_t* importance,
                     PickScratch scratch) const {
  const Plan& plan = s.plan;
  if (plan.selector == Selector::window)
    pick_window(count, plan.k, scratch);
  else if (plan.selector == Selector::probe && !s.is_prefill)
    pick_probe(scores, importance, count, plan.k, scratch);
  else if (plan.mass > 0)
    pick_mass(scores, count, plan.mass, plan.k_min, plan.k, s.is_prefill, scratch);
  else
    pick_guarded(scores, count, plan.k, s.is_prefill, scratch);
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
  for (int g = 0; s.plan.by_scores() && g < shape_.group_size(); g++)
    for (int row = begin; row < end; row += kMaxRows) {
      const int rows = std::min(kMaxRows, end - row);
      const Queries q = queries.view(s, row, kv_head * shape_.group_size() + g, false);
      score(s, layer, kv_head, q, rows, diagonal * s.plan.block_size, scores, stride, thread);
      for (int r = 0; r < rows; r++, first = false)
        merge_row(scores + r * stride, diagonal, diagonal, first, merged);
    }
  if (s.plan.by_scores())
    merged[diagonal] = 0;  // always taken, whatever its score
  else if (s.plan.by_shares())
    tile_shares(s, queries, layer, kv_head, tile, merged, thread);
  else if (s.plan.selector == Selector::random)
    draw(s.plan, layer, kv_head * shape_.group_size(), page * kBlock, diagonal + 1, merged);
  PickScratch marks{scratch.taken.data(), scratch.order.data()};
  pick(s, merged, diagonal + 1, nullptr, marks);
  store_list(s, marks.taken, page + 1, kv_head, tile, lists);
}

void Selection::run(Worker& worker, const std::vector<Segment>& segments,
                    const FoldedQueries& queries, int layer) {
  if (shape_.window) return;  // a window is read exactly, whatever the plan
  for (size_t i = 0; i < segments.size(); i++) {
    const Segment& s = segments[i];
    Lists& lists = lists_[i];
    if (const int completed = Anchors::num_completed(s))  // in an exact layer too: others reuse it
      worker.share(completed, 1, [&](int64_t item) {
        anchors_.build(s, queries, layer, static_cast<int>(item));
      });
    if (const int completed = Vectors::num_completed(s))
      worker.share(completed, 1,
                   [&](int64_t item) { vectors_.build(s, layer, static_cast<int>(item)); });
    if (!s.is_sparse || s.plan.is_exact(layer) || (!s.is_prefill && !decode_is_sparse(s))) continue;
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
    if (s.plan.selector == Selector::probe && s.importance) {
      sums = importance_.data() + importance_at_[i];
      const int64_t* tokens = s.importance + layer * s.importance_tokens;
      const int size = s.plan.block_size;
      worker.share(ceil_div(s.end(), size), 64, [&](int64_t block) {
        const int64_t begin = block * size, end = std::min<int64_t>(begin + size, s.end());
        sums[block] = 0;
        for (int64_t t = begin; t < end; t++) sums[block] += tokens[t];
      });
    }
    if (s.plan.by_shares()) {
      select_by_shares(worker, s, queries, layer, lists);
      continue;
    }
    if (s.plan.by_scores()) score_decode(worker, i, s, queries, layer, lists.heads);
    worker.share(lists.heads, 1, [&](int64_t item) {
      const int head = static_cast<int>(item);
      if (s.plan.selector == Selector::random)
        select_decode_at_random(s, layer, head, lists, worker.id());
      else
        select_decode(i, s, head, sums, lists, worker.id());
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
