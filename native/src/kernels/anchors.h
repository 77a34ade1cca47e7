// Selector `anchors`: logits of its index, and block masses from them.
#pragma once

#include "../kernels/logits.h"
#include "kvsieve/kernels.h"

namespace kvsieve::KVSIEVE_TARGET {

template <int R>
static inline void anchor_logits_rows(const uint8_t* record, int head_dim, const Queries& q,
                                      const AnchorRow* about, float* out, int stride,
                                      int vector_stride) {
  const float* scales =
      reinterpret_cast<const float*>(record + kAnchorVectors * head_dim * kIndexLanes);
  const float* spreads = scales + kAnchorVectors * kIndexLanes;
  for (int v = 0; v < kAnchorVectors; v++) {
    const uint8_t* keys = record + static_cast<ptrdiff_t>(v) * head_dim * kIndexLanes;
    I a[R];
    KVSIEVE_UNROLL
    for (int r = 0; r < R; r++) a[r] = i_set1(about[r].offset);
    for (int c = 0; c < head_dim / 4; c++) {
      B k = b_load(keys + c * 64);
      KVSIEVE_UNROLL
      for (int r = 0; r < R; r++)
        a[r] = dot4(a[r], k, b_broadcast4(q.codes + static_cast<ptrdiff_t>(r) * q.stride + c * 4));
    }
    F scale = f_load(scales + v * kIndexLanes);
    KVSIEVE_UNROLL
    for (int r = 0; r < R; r++) {
      F logit = to_float(a[r]) * (scale * f_set1(q.scale[r * q.scale_stride]));
      if (v == kAnchors) {  // of the mean: the spread around it, as of a normal distribution
        F gain = f_load(spreads) * f_set1(about[r].energy[0]);
        for (int b = 1; b < kAnchorBands; b++)
          gain = gain + f_load(spreads + b * kIndexLanes) * f_set1(about[r].energy[b]);
        logit = logit + gain;
      }
      f_store(out + v * vector_stride + static_cast<ptrdiff_t>(r) * stride, logit);
    }
  }
}

static void anchor_logits(const uint8_t* record, int head_dim, const Queries& q,
                          const AnchorRow* about, int rows, float* out, int stride,
                          int vector_stride) {
  by_rows(rows, [&]<int R>(int row) {
    anchor_logits_rows<R>(record, head_dim, rows_from(q, row), about + row,
                          out + static_cast<ptrdiff_t>(row) * stride, stride, vector_stride);
  });
}

static float block_masses(float* logits, int vector_stride, int indexed, float* recent,
                          int num_recent, float* masses) {
  F largest = f_set1(kMinusInfinity);
  auto look = [&](float* at, int lanes) {
    F x = f_load(at);
    if (lanes < 16) {
      x = f_keep_first(x, lanes > 0 ? lanes : 0, f_set1(kMinusInfinity));
      f_store(at, x);
    }
    largest = f_max(x, largest);
  };
  for (int v = 0; v < kAnchorVectors; v++)
    for (int b = 0; b < indexed; b += 16) look(logits + v * vector_stride + b, indexed - b);
  for (int t = 0; t < 2 * kBlock; t += 16) look(recent + t, num_recent - t);
  const float top = f_reduce_max(largest);
  const F shift = f_set1(top);
  for (int b = 0; b < indexed; b += 16) {
    F mass = f_exp(f_load(logits + b) - shift);
    for (int v = 1; v < kAnchors; v++)
      mass = mass + f_exp(f_load(logits + v * vector_stride + b) - shift);
    F rest = f_exp(f_load(logits + kAnchors * vector_stride + b) - shift);
    f_store(masses + b, mass + f_set1(kBlock - kAnchors) * rest);
  }
  for (int half = 0; half < 2; half++) {
    float* at = recent + half * kBlock;
    masses[indexed + half] =
        f_reduce_add(f_exp(f_load(at) - shift) + f_exp(f_load(at + 16) - shift));
  }
  return top;
}

static void add_shares(const float* masses, int count, bool add, float* shares) {
  F sums = f_zero();
  for (int b = 0; b < count; b += 16)
    sums = sums + f_keep_first(f_load(masses + b), count - b < 16 ? count - b : 16, f_zero());
  const F unit = f_set1(1.0f / f_reduce_add(sums));
  for (int b = 0; b < count; b += 16) {
    F share = f_load(masses + b) * unit, before = f_load(shares + b);
    f_store(shares + b, add ? before + share : f_max(share, before));
  }
}

static float exact_masses(const float* logits, int pages, float top, float* masses) {
  F largest = f_set1(top);
  for (int i = 0; i < 2 * pages; i++) largest = f_max(f_load(logits + i * 16), largest);
  top = f_reduce_max(largest);
  const F shift = f_set1(top);
  for (int page = 0; page < pages; page++) {
    const float* at = logits + page * kBlock;
    masses[page] = f_reduce_add(f_exp(f_load(at) - shift) + f_exp(f_load(at + 16) - shift));
  }
  return top;
}

}  // namespace kvsieve::KVSIEVE_TARGET
