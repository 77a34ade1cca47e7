#include "kvsieve/segment.h"

#include <algorithm>
#include <cstring>

namespace kvsieve {

void Lists::reset(int new_heads, int new_tiles, int new_capacity) {
  heads = new_heads;
  tiles = new_tiles;
  capacity = new_capacity;
  lengths.assign(static_cast<size_t>(heads) * tiles, -1);
  const size_t need = static_cast<size_t>(heads) * tiles * capacity;
  if (blocks.size() < need) blocks.resize(need);
  skipped.clear();
  skipped_top.clear();
}

bool Lists::all_exact() const {
  return std::all_of(lengths.begin(), lengths.end(), [](int32_t n) { return n < 0; });
}

namespace {

// Copies a token's key from its q8 page into the lane of its selection block.
void index_key(const Segment& s, int layer, int kv_head, int position, const uint8_t* page) {
  const int offset = position % s.index_block;
  if (offset % s.index_step) return;
  const int entry = offset / s.index_step, block = position / s.index_block;
  const int lane = block % kIndexLanes, slot = position % kBlock, d = s.layout.head_dim;
  uint8_t* record = s.index_record(layer, kv_head, block / kIndexLanes);
  uint8_t* keys = record + static_cast<size_t>(entry) * d * kIndexLanes;
  for (int c = 0; c < d / 4; c++)
    std::memcpy(keys + (c * kIndexLanes + lane) * 4, page + (c * kBlock + slot) * 4, 4);
  const size_t scales = static_cast<size_t>(s.index_entries) * d * kIndexLanes;
  std::memcpy(record + scales + (entry * kIndexLanes + lane) * sizeof(float),
              page + s.layout.k_scale + slot * sizeof(float), sizeof(float));
}

}  // namespace

bool append_tile(const Kernels& kernels, const Segment& s, int layer, int head, int tile,
                 const float* k, const float* v) {
  const int d = s.layout.head_dim;
  uint8_t* page = s.page(layer, head, s.first_tile() + tile);
  bool finite = true;
  for (int position = s.tile_begin(tile); position < s.tile_end(tile); position++) {
    const size_t row = static_cast<size_t>(s.first_row) + position - s.start;
    const size_t at = (row * s.num_kv_heads + head) * d;
    if (!kernels.append(s.layout, page, position % kBlock, k + at, v + at))
      finite = false;
    else if (s.index_is_strided())
      index_key(s, layer, head, position, page);
  }
  return finite;
}

void FoldedQueries::prepare(HeadShape shape, int rows, float* q) {
  shape_ = shape;
  values_ = q;
  const size_t heads = static_cast<size_t>(rows) * shape.num_q_heads;
  codes_.reserve(heads * shape.head_dim);
  scale_.reserve(heads);
  sum_.reserve(heads * kMaxScaleGroups);
}

bool FoldedQueries::fold(const Kernels& kernels, const Segment& segment, int row, int head,
                         float scale) {
  const int d = shape_.head_dim, groups = segment.layout.k_groups();
  const size_t at = static_cast<size_t>(segment.first_row + row) * shape_.num_q_heads + head;
  return kernels.fold_query(values_ + at * d, scale, d, groups, codes_.data() + at * d,
                            scale_.data() + at, sum_.data() + at * groups);
}

Queries FoldedQueries::view(const Segment& segment, int row, int head,
                            bool successive_heads) const {
  const int d = shape_.head_dim, groups = segment.layout.k_groups();
  const size_t at = static_cast<size_t>(segment.first_row + row) * shape_.num_q_heads + head;
  const int step = successive_heads ? 1 : shape_.num_q_heads;
  return {values_ + at * d,   codes_.data() + at * d,
          scale_.data() + at, sum_.data() + at * groups,
          step * d,           step,
          step * groups};
}

}  // namespace kvsieve
