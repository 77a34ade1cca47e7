#include "kvsieve/vectors.h"

#include <algorithm>
#include <cmath>

#include "kvsieve/records.h"

namespace kvsieve {

namespace {

// What a vector of the index meets, of a query's code.
int8_t met_code(VectorRule rule, int vector, int code) {
  if (rule == VectorRule::minmax)
    code = vector == 0 ? std::max(code, 0) : std::min(code, 0);
  else if (vector == 1)
    code = std::abs(code);
  return static_cast<int8_t>(code);
}

// Channel by channel over the 32 keys of a page: largest and smallest, or mean and spread.
void summarize(const Segment& s, const uint8_t* page, float* first, float* second) {
  const int d = s.layout.head_dim;
  const bool bounds = s.index_rule == VectorRule::minmax;
  float key[kMaxHeadDim];
  read_key(s, page, 0, first);
  if (bounds) std::copy_n(first, d, second);
  for (int t = 1; t < kBlock; t++) {
    read_key(s, page, t, key);
    for (int c = 0; c < d; c++) {
      if (bounds) second[c] = std::min(second[c], key[c]);
      first[c] = bounds ? std::max(first[c], key[c]) : first[c] + key[c];
    }
  }
  if (bounds) return;
  for (int c = 0; c < d; c++) first[c] /= kBlock;
  if (s.index_rule == VectorRule::mean) return;
  std::fill_n(second, d, 0.0f);
  for (int t = 0; t < kBlock; t++) {
    read_key(s, page, t, key);
    for (int c = 0; c < d; c++) second[c] += (key[c] - first[c]) * (key[c] - first[c]);
  }
  for (int c = 0; c < d; c++) second[c] = std::sqrt(second[c] / kBlock);
}

}  // namespace

void Vectors::prepare(HeadShape shape) {
  head_dim_ = shape.head_dim;
  for (Scratch& scratch : scratch_)
    scratch.codes.reserve(static_cast<size_t>(kVectors) * kMaxRows * head_dim_);
}

int Vectors::num_completed(const Segment& s) {
  if (!s.index || s.index_rule == VectorRule::none) return 0;
  return (s.end() / kBlock - s.first_tile()) * s.num_kv_heads;
}

void Vectors::build(const Segment& s, int layer, int item) const {
  const int block = s.first_tile() + item / s.num_kv_heads, kv_head = item % s.num_kv_heads;
  const int d = s.layout.head_dim, lane = block % kIndexLanes;
  float vectors[kVectors][kMaxHeadDim];
  summarize(s, s.page(layer, kv_head, block), vectors[0], vectors[1]);
  uint8_t* record = s.index_record(layer, kv_head, block / kIndexLanes);
  const size_t vector_bytes = static_cast<size_t>(d) * kIndexLanes;
  float* scales = reinterpret_cast<float*>(record + s.index_entries * vector_bytes);
  for (int v = 0; v < s.index_entries; v++) {
    uint8_t codes[kMaxHeadDim];
    scales[v * kIndexLanes + lane] = s.index_rule == VectorRule::minmax
                                         ? quantize_outward(vectors[v], d, v == 0, codes)
                                         : quantize_row(vectors[v], d, codes);
    store_lane(codes, d, lane, record + v * vector_bytes);
  }
}

VectorQueries Vectors::fold(const Segment& s, const Queries& q, int rows, int thread) {
  Scratch& scratch = scratch_[thread];
  for (int v = 0; v < s.index_entries; v++)
    for (int r = 0; r < rows; r++) {
      const int8_t* codes = q.codes + static_cast<ptrdiff_t>(r) * q.stride;
      int8_t* met = scratch.codes.data() + static_cast<ptrdiff_t>(v * kMaxRows + r) * head_dim_;
      int sum = 0;
      for (int c = 0; c < head_dim_; c++) sum += met[c] = met_code(s.index_rule, v, codes[c]);
      scratch.offsets[v * kMaxRows + r] = -128 * sum;
    }
  return {scratch.codes.data(), scratch.offsets, q.scale, q.scale_stride};
}

void Vectors::score(const Segment& s, int layer, int kv_head, const Queries& q,
                    const VectorQueries& vectors, int rows, int n, int group, int ahead, float* out,
                    int stride) const {
  const int per_block = s.plan.block_size / kBlock, full = n / kBlock;
  const int begin = group * kIndexLanes * per_block;  // blocks of 32
  const int end = std::min(begin + kIndexLanes * per_block, full);
  auto raise = [&](int r, int page, float value) {
    float& best = out[static_cast<ptrdiff_t>(r) * stride + page / per_block];
    best = page % per_block ? std::max(best, value) : value;
  };
  for (int page = begin; page < end; page += kIndexLanes) {
    const uint8_t* record = s.index_record(layer, kv_head, page / kIndexLanes);
    if (per_block == 1) {
      const uint8_t* next = ahead < 0 ? nullptr : s.index_record(layer, kv_head, ahead);
      kernels_.vector_scores(record, next, s.index_entries, head_dim_, vectors, rows, out + page,
                             stride);
      continue;
    }
    alignas(64) float lanes[kMaxRows * kIndexLanes];
    kernels_.vector_scores(record, nullptr, s.index_entries, head_dim_, vectors, rows, lanes,
                           kIndexLanes);
    for (int r = 0; r < rows; r++)
      for (int lane = 0; lane < std::min(kIndexLanes, end - page); lane++)
        raise(r, page + lane, lanes[r * kIndexLanes + lane]);
  }
  const int visible = n % kBlock;  // of the open block: it has no record
  if (!visible || full < begin || full >= begin + kIndexLanes * per_block) return;
  alignas(64) float logits[kMaxRows * kBlock];
  kernels_.page_logits(s.layout, s.page(layer, kv_head, full), q, rows, logits, kBlock);
  for (int r = 0; r < rows; r++)
    raise(r, full, *std::max_element(logits + r * kBlock, logits + r * kBlock + visible));
}

}  // namespace kvsieve
