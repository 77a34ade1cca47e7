// What a step reads and writes: the rows of each sequence, its pages, and the lists chosen for it.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "kvsieve/buffer.h"
#include "kvsieve/kernels.h"

namespace kvsieve {

struct HeadShape {
  int num_q_heads, num_kv_heads, head_dim;
  int window = 0;  // tokens that a row reads, its own included; 0: all up to its own
  int group_size() const { return num_q_heads / num_kv_heads; }
  // First block that exact attention lists for the rows of block `block`. It follows from the
  // block alone, so that a prompt and a decoded token cut the same runs.
  int first_block(int block) const {
    return window && block * kBlock >= window ? (block * kBlock - window + 1) / kBlock : 0;
  }
};

enum class Selector : int {
  probe = 0,
  even = 1,
  anchors = 2,
  window = 3,
  minmax = 4,
  mean = 5,
  meanstd = 6,
  oracle = 7,
  random = 8
};

// What the vectors of an index of vectors are; none: the index is of another kind.
enum class VectorRule : int { none = 0, minmax = 1, mean = 2, meanstd = 3 };

// A sparse plan; the twin of kernels/backend.py's SparsePlan. k counts blocks of block_size tokens.
struct Plan {
  Selector selector;
  int k, block_size, num_probes;
  bool share_group;
  int exact_from_tile;
  float mass;  // budget of `anchors`: blocks until their estimated mass is this, k_min to k; 0: k
  int k_min;
  std::vector<int> exact_layers;
  std::vector<std::pair<int, int>> layer_k;  // budgets of single layers
  int usual_k;                               // of all others
  int seed;                                  // of selector `random`

  // `k` becomes the budget of that layer.
  void enter(int layer) {
    k = usual_k;
    for (const auto& [own, budget] : layer_k)
      if (own == layer) k = budget;
  }
  bool is_exact(int layer) const {
    return std::find(exact_layers.begin(), exact_layers.end(), layer) != exact_layers.end();
  }
  // Whether scores are shares of the attention, estimated or true.
  bool by_shares() const { return selector == Selector::anchors || selector == Selector::oracle; }
  bool by_vectors() const {
    return selector == Selector::minmax || selector == Selector::mean ||
           selector == Selector::meanstd;
  }
  // Whether every row of every head scores blocks by keys or vectors.
  bool by_scores() const {
    return selector == Selector::probe || selector == Selector::even || by_vectors();
  }
};

// The rows that one sequence contributes to a step, and its cache.
struct Segment {
  int start, q_len;
  bool is_prefill, is_sparse;
  PageLayout layout;
  Plan plan;
  int num_kv_heads;
  uint8_t* pages;  // [layer][page][kv head][layout.bytes]
  size_t layer_page_bytes;
  const int32_t* block_table;
  uint8_t* index;  // [layer][group][kv head][record]; null without one
  size_t layer_index_bytes;
  int index_block, index_step, index_entries;
  bool index_is_anchors;
  VectorRule index_rule;
  int64_t* importance;  // [layer][importance_tokens]; null without
  size_t importance_tokens;
  bool record_importance;
  int first_row;  // of this segment among the step's rows
  int64_t pairs_attended = 0, pairs_causal = 0;
  std::vector<std::vector<float>> kept_mass;  // decode with anchors: [layer run][query head]

  int end() const { return start + q_len; }
  int first_tile() const { return start / kBlock; }
  int num_tiles() const { return is_prefill ? (end() - 1) / kBlock - first_tile() + 1 : 1; }
  int num_blocks() const { return (end() + kBlock - 1) / kBlock; }
  // Rows of prefill tile `tile` (counted from the first), as positions [begin, end).
  int tile_begin(int tile) const {
    const int at = (first_tile() + tile) * kBlock;
    return at > start ? at : start;
  }
  int tile_end(int tile) const {
    const int at = (first_tile() + tile + 1) * kBlock;
    return at < end() ? at : end();
  }
  uint8_t* page(int layer, int kv_head, int block) const {
    return pages + layer * layer_page_bytes +
           (static_cast<size_t>(block_table[block]) * num_kv_heads + kv_head) * layout.bytes;
  }
  // Whether the index holds evenly spaced keys.
  bool index_is_strided() const {
    return index && !index_is_anchors && index_rule == VectorRule::none;
  }
  size_t index_record_bytes() const {
    const int spreads = index_is_anchors ? kAnchorBands : 0;
    return (static_cast<size_t>(index_entries) * (layout.head_dim + 4) + 4 * spreads) * kIndexLanes;
  }
  uint8_t* index_record(int layer, int kv_head, int group) const {
    return index + layer * layer_index_bytes +
           (static_cast<size_t>(group) * num_kv_heads + kv_head) * index_record_bytes();
  }
};

// Blocks chosen for each (head, tile) of a segment; length -1 means every causal block.
struct Lists {
  int heads = 0, tiles = 0, capacity = 0;
  std::vector<int32_t> lengths, blocks;
  // Decode with anchors, per query head: estimated mass of the blocks that are not read, in units
  // of exp(skipped_top); empty where nobody estimates.
  std::vector<float> skipped, skipped_top;

  // Every list exact; memory only grows.
  void reset(int new_heads, int new_tiles, int new_capacity);
  bool all_exact() const;
  int32_t& length(int head, int tile) { return lengths[head * tiles + tile]; }
  int32_t length(int head, int tile) const { return lengths[head * tiles + tile]; }
  int32_t* row(int head, int tile) {
    return blocks.data() + static_cast<size_t>(head * tiles + tile) * capacity;
  }
  const int32_t* row(int head, int tile) const {
    return blocks.data() + static_cast<size_t>(head * tiles + tile) * capacity;
  }
};

// Writes one head's rows of a tile, k, v [rows][Hkv * D], into their page, and the strided keys
// into the index. False if a row with NaN or infinity was left out.
bool append_tile(const Kernels& kernels, const Segment& segment, int layer, int head, int tile,
                 const float* k, const float* v);

// The queries of a step with the softmax scale folded in, in f32 and as integers.
class FoldedQueries {
 public:
  // q [rows][Hq * D] is scaled in place, one (row, head) at a time. Not called by workers.
  void prepare(HeadShape shape, int rows, float* q);
  // False on NaN or infinity.
  bool fold(const Kernels& kernels, const Segment& segment, int row, int head, float scale);
  // Rows from (row, head) on: successive heads of one token, or successive tokens of one head.
  Queries view(const Segment& segment, int row, int head, bool successive_heads) const;

 private:
  HeadShape shape_{};
  float* values_ = nullptr;
  Buffer<int8_t> codes_;
  Buffer<float> scale_;
  Buffer<int32_t> sum_;
};

}  // namespace kvsieve
