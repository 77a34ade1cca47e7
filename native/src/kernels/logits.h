// Query rows times keys: the 32 tokens of a page, or what the index holds of 16 blocks.
//
// Up to 8 rows share every load of keys; a row's arithmetic never depends on the others.
#pragma once

#include "kvsieve/kernels.h"

namespace kvsieve::KVSIEVE_TARGET {

constexpr float kMinusInfinity = -__builtin_inff();

// -- logits ----------------------------------------------------------------------------------

// Adds one scale group (`chunks` x 4 dims) of integer keys to the logits of R rows.
template <int R, bool kNibbles>
static inline void integer_logits(const uint8_t* keys, const float* scales, int chunks, int offset,
                                  const Queries& q, int group, bool first, float* out, int stride) {
  I a[R][2];
  const int8_t* codes = q.codes + group * kGroup;  // q8 has one group, starting at 0
  KVSIEVE_UNROLL
  for (int r = 0; r < R; r++)
    a[r][0] = a[r][1] = i_set1(-offset * q.codes_sum[r * q.sum_stride + group]);
  for (int c = 0; c < chunks; c++) {
    B k0 = b_load(keys + c * 128), k1 = b_load(keys + c * 128 + 64);
    KVSIEVE_UNROLL
    for (int r = 0; r < R; r++) {
      B x = b_broadcast4(codes + static_cast<ptrdiff_t>(r) * q.stride + c * 4);
      if constexpr (kNibbles) {
        a[r][0] = dot4_nibble(a[r][0], k0, x);
        a[r][1] = dot4_nibble(a[r][1], k1, x);
      } else {
        a[r][0] = dot4(a[r][0], k0, x);
        a[r][1] = dot4(a[r][1], k1, x);
      }
    }
  }
  F s[2] = {f_load(scales), f_load(scales + 16)};
  KVSIEVE_UNROLL
  for (int r = 0; r < R; r++) {
    F q_scale = f_set1(q.scale[r * q.scale_stride]);
    KVSIEVE_UNROLL
    for (int half = 0; half < 2; half++) {
      float* at = out + static_cast<ptrdiff_t>(r) * stride + half * 16;
      F x = to_float(a[r][half]), scale = s[half] * q_scale;
      f_store(at, first ? x * scale : f_fma(x, scale, f_load(at)));
    }
  }
}

template <int R>
static inline void float_logits(const uint8_t* page, bool half_precision, int head_dim,
                                const Queries& q, float* out, int stride) {
  F a[R][2];
  KVSIEVE_UNROLL
  for (int r = 0; r < R; r++) a[r][0] = a[r][1] = f_zero();
  const float* wide = reinterpret_cast<const float*>(page);
  const uint16_t* narrow = reinterpret_cast<const uint16_t*>(page);
  for (int d = 0; d < head_dim; d++) {
    F k0 = half_precision ? f_load_f16(narrow + d * kBlock) : f_load(wide + d * kBlock);
    F k1 = half_precision ? f_load_f16(narrow + d * kBlock + 16) : f_load(wide + d * kBlock + 16);
    KVSIEVE_UNROLL
    for (int r = 0; r < R; r++) {
      F x = f_set1(q.values[static_cast<ptrdiff_t>(r) * q.stride + d]);
      a[r][0] = f_fma(k0, x, a[r][0]);
      a[r][1] = f_fma(k1, x, a[r][1]);
    }
  }
  KVSIEVE_UNROLL
  for (int r = 0; r < R; r++) {
    f_store(out + static_cast<ptrdiff_t>(r) * stride, a[r][0]);
    f_store(out + static_cast<ptrdiff_t>(r) * stride + 16, a[r][1]);
  }
}

template <int R>
static void page_logits_rows(const PageLayout& layout, const uint8_t* page, const Queries& q,
                             float* out, int stride) {
  const int d = layout.head_dim;
  const float* scales = reinterpret_cast<const float*>(page + layout.k_scale);
  if (layout.k_type == CacheType::q8) {
    integer_logits<R, false>(page, scales, d / 4, 128, q, 0, true, out, stride);
  } else if (layout.k_type == CacheType::q4) {
    alignas(64) uint8_t codes[kMaxHeadDim / 4 * 128];
    for (int c = 0; c < d / 8; c++) KVSIEVE_UNROLL
    for (int half = 0; half < 2; half++) {
      B packed = b_load(page + c * 128 + half * 64);
      b_store(codes + c * 128 + half * 64, b_low_nibbles(packed));
      b_store(codes + (c + d / 8) * 128 + half * 64, b_high_nibbles(packed));
    }
    for (int g = 0; g < d / kGroup; g++)
      integer_logits<R, true>(codes + g * 8 * 128, scales + g * kBlock, 8, 8, q, g, g == 0, out,
                              stride);
  } else {
    float_logits<R>(page, layout.k_type == CacheType::f16, d, q, out, stride);
  }
}

// Calls f with R as a compile-time constant, the largest first; rows keep their order.
template <class Function>
static inline void by_rows(int rows, const Function& f) {
  int row = 0;
  auto step = [&]<int R>() {
    for (; row + R <= rows; row += R) f.template operator()<R>(row);
  };
  step.template operator()<8>();
  step.template operator()<4>();
  step.template operator()<3>();
  step.template operator()<2>();
  step.template operator()<1>();
}

static inline Queries rows_from(Queries q, int row) {
  q.values += static_cast<ptrdiff_t>(row) * q.stride;
  q.codes += static_cast<ptrdiff_t>(row) * q.stride;
  q.scale += static_cast<ptrdiff_t>(row) * q.scale_stride;
  q.codes_sum += static_cast<ptrdiff_t>(row) * q.sum_stride;
  return q;
}

static void page_logits(const PageLayout& layout, const uint8_t* page, const Queries& q, int rows,
                        float* out, int out_stride) {
  by_rows(rows, [&]<int R>(int row) {
    page_logits_rows<R>(layout, page, rows_from(q, row),
                        out + static_cast<ptrdiff_t>(row) * out_stride, out_stride);
  });
}

// -- selector index ----------------------------------------------------------------------------

template <int R>
static inline void index_scores_rows(const uint8_t* record, const uint8_t* ahead, int entries,
                                     int step, int head_dim, const Queries& q, float* out,
                                     int stride) {
  const float* scales = reinterpret_cast<const float*>(record + entries * head_dim * kIndexLanes);
  F best[R];
  KVSIEVE_UNROLL
  for (int r = 0; r < R; r++) best[r] = f_set1(kMinusInfinity);
  for (int e = 0; e < entries; e += step) {
    const uint8_t* keys = record + static_cast<ptrdiff_t>(e) * head_dim * kIndexLanes;
    I a[R];
    KVSIEVE_UNROLL
    for (int r = 0; r < R; r++) a[r] = i_set1(-128 * q.codes_sum[r * q.sum_stride]);
    for (int c = 0; c < head_dim / 4; c++) {
      // One line with each vector: in one burst they would fill the slots for misses.
      if (ahead) __builtin_prefetch(ahead + (keys - record) + c * 64, 0, 2);
      B k = b_load(keys + c * 64);
      KVSIEVE_UNROLL
      for (int r = 0; r < R; r++)
        a[r] = dot4(a[r], k, b_broadcast4(q.codes + static_cast<ptrdiff_t>(r) * q.stride + c * 4));
    }
    F scale = f_load(scales + e * kIndexLanes);
    KVSIEVE_UNROLL
    for (int r = 0; r < R; r++)
      best[r] = f_max(to_float(a[r]) * (scale * f_set1(q.scale[r * q.scale_stride])), best[r]);
  }
  KVSIEVE_UNROLL
  for (int r = 0; r < R; r++) f_store(out + static_cast<ptrdiff_t>(r) * stride, best[r]);
}

static void index_scores(const uint8_t* record, const uint8_t* ahead, int entries, int step,
                         int head_dim, const Queries& q, int rows, float* out, int out_stride) {
  by_rows(rows, [&]<int R>(int row) {
    index_scores_rows<R>(record, row ? nullptr : ahead, entries, step, head_dim, rows_from(q, row),
                         out + static_cast<ptrdiff_t>(row) * out_stride, out_stride);
  });
}

}  // namespace kvsieve::KVSIEVE_TARGET
