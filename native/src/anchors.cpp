#include "kvsieve/anchors.h"

#include <algorithm>

#include "kvsieve/records.h"

namespace kvsieve {

namespace {

// Share of the logits' variance that raises the mean's.
constexpr float kSpreadGain = 0.2f;

// First tile whose last row is among a segment's rows and has two blocks behind it.
int first_closing_tile(const Segment& s) { return std::max(2, s.first_tile() + 1); }

}  // namespace

void Anchors::prepare(HeadShape shape, const std::vector<Segment>& segments) {
  shape_ = shape;
  size_t floats = 0;
  for (const Segment& s : segments)
    if (s.index_is_anchors)
      floats = std::max(floats, static_cast<size_t>(kAnchorVectors) * kMaxRows * stride(s));
  for (Scratch& scratch : scratch_) scratch.logits.reserve(floats);
}

int Anchors::num_completed(const Segment& s) {
  return s.index_is_anchors ? std::max(0, s.end() / kBlock - first_closing_tile(s) + 1) : 0;
}

void Anchors::build(const Segment& s, const FoldedQueries& queries, int layer, int item) const {
  const int tile = first_closing_tile(s) + item, block = tile - 2;
  const int row = tile * kBlock - 1 - s.start;
  // What each token received from this row, summed over query heads; each head attends to the two
  // blocks alone, so that nothing but them and the row decides.
  float received[kBlock] = {}, logits[2 * kBlock];
  for (int head = 0; head < shape_.num_q_heads; head++) {
    const int kv_head = head / shape_.group_size();
    const Queries q = queries.view(s, row, head, true);
    for (int half = 0; half < 2; half++)
      kernels_.page_logits(s.layout, s.page(layer, kv_head, block + half), q, 1,
                           logits + half * kBlock, kBlock);
    const float top = *std::max_element(logits, logits + 2 * kBlock);
    float sum = 0;
    for (float& x : logits) sum += x = kernels_.exp(x - top);
    for (int t = 0; t < kBlock; t++) received[t] += logits[t] / sum;
  }
  int order[kBlock];
  for (int t = 0; t < kBlock; t++) order[t] = t;
  std::partial_sort(order, order + kAnchors, order + kBlock, [&](int a, int b) {
    return received[a] > received[b] || (received[a] == received[b] && a < b);
  });
  for (int kv_head = 0; kv_head < shape_.num_kv_heads; kv_head++)
    write_record(s, layer, kv_head, block, order);
}

void Anchors::write_record(const Segment& s, int layer, int kv_head, int block,
                           const int* chosen) const {
  const int d = s.layout.head_dim, lane = block % kIndexLanes, band = d / kAnchorBands;
  constexpr float kRest = kBlock - kAnchors;
  const uint8_t* page = s.page(layer, kv_head, block);
  float vectors[kAnchorVectors][kMaxHeadDim], key[kMaxHeadDim], square[kMaxHeadDim] = {};
  float* mean = vectors[kAnchors];
  std::fill_n(mean, d, 0.0f);
  auto each_other = [&](auto add) {
    for (int t = 0; t < kBlock; t++) {
      if (std::find(chosen, chosen + kAnchors, t) != chosen + kAnchors) continue;
      read_key(s, page, t, key);
      for (int c = 0; c < d; c++) add(c, key[c]);
    }
  };
  for (int a = 0; a < kAnchors; a++) read_key(s, page, chosen[a], vectors[a]);
  each_other([&](int c, float x) { mean[c] += x; });
  for (int c = 0; c < d; c++) mean[c] /= kRest;
  each_other([&](int c, float x) { square[c] += (x - mean[c]) * (x - mean[c]); });

  uint8_t* record = s.index_record(layer, kv_head, block / kIndexLanes);
  uint8_t codes[kMaxHeadDim];
  float* floats = reinterpret_cast<float*>(record + static_cast<size_t>(kAnchorVectors) * d *
                                                        kIndexLanes);  // scales, then spreads
  for (int v = 0; v < kAnchorVectors; v++) {
    floats[v * kIndexLanes + lane] = quantize_row(vectors[v], d, codes);
    store_lane(codes, d, lane, record + static_cast<size_t>(v) * d * kIndexLanes);
  }
  for (int b = 0; b < kAnchorBands; b++) {
    float sum = 0;
    for (int c = b * band; c < (b + 1) * band; c++) sum += square[c];
    floats[(kAnchorVectors + b) * kIndexLanes + lane] = sum / (kRest * static_cast<float>(band));
  }
}

void Anchors::estimate(const Segment& s, int layer, int kv_head, const Queries& q, int rows,
                       int own, const int* visible, float* masses, int stride, float* top,
                       int thread) {
  const int d = s.layout.head_dim, band = d / kAnchorBands, indexed = own - 1;
  AnchorRow about[kMaxRows];
  for (int r = 0; r < rows; r++) {
    const int8_t* codes = q.codes + static_cast<ptrdiff_t>(r) * q.stride;
    const float scale = q.scale[r * q.scale_stride];
    about[r].offset = 0;
    for (int b = 0; b < kAnchorBands; b++) {
      int squares = 0;
      for (int c = b * band; c < (b + 1) * band; c++) {
        about[r].offset -= 128 * codes[c];
        squares += codes[c] * codes[c];
      }
      about[r].energy[b] = kSpreadGain * (scale * scale) * static_cast<float>(squares);
    }
  }
  float* logits = scratch_[thread].logits.data();
  const int vector_stride = kMaxRows * stride;
  for (int block = 0; block < indexed; block += kIndexLanes)
    kernels_.anchor_logits(s.index_record(layer, kv_head, block / kIndexLanes), d, q, about, rows,
                           logits + block, stride, vector_stride);
  alignas(64) float recent[kMaxRows * 2 * kBlock];
  for (int half = 0; half < 2; half++)
    kernels_.page_logits(s.layout, s.page(layer, kv_head, indexed + half), q, rows,
                         recent + half * kBlock, 2 * kBlock);
  for (int r = 0; r < rows; r++)
    top[r] = kernels_.block_masses(logits + static_cast<ptrdiff_t>(r) * stride, vector_stride,
                                   indexed, recent + r * 2 * kBlock, visible[r] - indexed * kBlock,
                                   masses + static_cast<ptrdiff_t>(r) * stride);
}

}  // namespace kvsieve
