// Attention over one run of pages, for up to 8 query rows that share every load of keys and values.
//
// Three passes over at most 512 tokens: logits; softmax and 8-bit probabilities; values. A row's
// arithmetic never depends on the other rows: sums run over tokens in lanes of 16 and over pages in
// order. Two passes (maximum first) instead of an online rescale: no dependence between pages.
#pragma once

#include "../kernels/logits.h"
#include "kvsieve/kernels.h"

namespace kvsieve::KVSIEVE_TARGET {

static inline int visible_in_page(int visible, int block) {
  const int n = visible - block * kBlock;
  return n < 0 ? 0 : n > kBlock ? kBlock : n;
}

// Tokens of listed page `p` that lie before the row's window.
static inline int unseen_in_page(const RunArgs& a, int row, int p) {
  return a.window ? a.visible[row] - a.window - a.blocks[p] * kBlock : 0;
}

// -- reading ahead -----------------------------------------------------------------------------

// A decoded token reads each page once, from memory: keys are asked for while the page before is
// computed (or the values of the run before), values while their own keys are. Pieces of 2 KiB are
// too short for the processor's own prefetch: 12 to 24 GB/s at head_dim 64, 17 to 26 at 128, of 33
// (Zen 4, 2 threads). Only into the second cache level: the first one's slots for misses are few.
static inline void ask_for_bytes(const uint8_t* begin, const uint8_t* end) {
  for (; begin < end; begin += 64) __builtin_prefetch(begin, 0, 2);
}

static inline void ask_for_keys(const RunArgs& a, const uint8_t* page) {
  ask_for_bytes(page, page + a.layout->v);
}

// -- softmax of a run ----------------------------------------------------------------------------

// logits -> exp(logit - m) in place; masked tokens become 0.
static inline void softmax_row(const RunArgs& a, int row) {
  float* x = a.logits + static_cast<ptrdiff_t>(row) * kRunTokens;
  F largest = f_set1(kMinusInfinity);
  for (int p = 0; p < a.num_pages; p++) {
    const int n = visible_in_page(a.visible[row], a.blocks[p]);
    KVSIEVE_UNROLL
    for (int half = 0; half < 2; half++) {
      float* at = x + p * kBlock + half * 16;
      F v = f_load(at);
      const int lanes = n - half * 16;
      if (lanes < 16) {
        v = f_keep_first(v, lanes > 0 ? lanes : 0, f_set1(kMinusInfinity));
        f_store(at, v);
      }
      const int hidden = unseen_in_page(a, row, p) - half * 16;
      if (hidden > 0) {
        v = f_keep_first(f_set1(kMinusInfinity), hidden < 16 ? hidden : 16, v);
        f_store(at, v);
      }
      largest = f_max(v, largest);
    }
  }
  const float m = f_reduce_max(largest);
  a.m[row] = m;
  F sum = f_zero();
  // A run without a visible token: subtracting -inf from itself would give NaN.
  const F shift = f_set1(m == kMinusInfinity ? 0.0f : m);
  for (int i = 0; i < a.num_pages * kBlock; i += 16) {
    F p = f_exp(f_load(x + i) - shift);
    sum = sum + p;
    f_store(x + i, p);
  }
  a.s[row] = f_reduce_add(sum);
}

// -- values ----------------------------------------------------------------------------------

// Probability times the size of the value's scale as unsigned 8 bits, one factor per page (and
// channel group). A q4 scale's sign is applied to the codes of the values instead.
static inline void quantize_probabilities(const RunArgs& a, int row, int group, float* factor) {
  const float* p = a.logits + static_cast<ptrdiff_t>(row) * kRunTokens;
  const int groups = a.layout->v_groups();
  uint8_t* codes = a.codes + (static_cast<ptrdiff_t>(row) * groups + group) * kRunTokens;
  auto weighted = [&](int page, int half) {
    const float* scales =
        reinterpret_cast<const float*>(a.pages[page] + a.layout->v_scale) + group * kBlock;
    F w = f_load(p + page * kBlock + half * 16) * f_abs(f_load(scales + half * 16));
    const int lanes = visible_in_page(a.visible[row], a.blocks[page]) - half * 16;
    // Whatever lies behind the last token must not enter, not even times zero: it may be NaN.
    return lanes < 16 ? f_keep_first(w, lanes > 0 ? lanes : 0, f_zero()) : w;
  };
  // A vector of candidates per page; one reduction for all 16 pages instead of one for each.
  alignas(64) float candidates[kRunBlocks][16], inverse[kRunBlocks];
  for (int i = 0; i < a.num_pages; i++)
    f_store(candidates[i], f_max(weighted(i, 0), weighted(i, 1)));
  for (int i = a.num_pages; i < kRunBlocks; i++) f_store(candidates[i], f_zero());
  F top = f_reduce_max_rows(candidates), tiny = f_set1(0x1p-100f);
  f_store(inverse, f_where_gt(top, tiny, f_set1(255.0f) / f_max(top, tiny), f_zero()));
  f_store(factor, top / f_set1(255.0f));
  for (int i = 0; i < a.num_pages; i++) KVSIEVE_UNROLL
  for (int half = 0; half < 2; half++)
    store_u8(codes + i * kBlock + half * 16, round_to_int(weighted(i, half) * f_set1(inverse[i])));
}

// o[R][N x 16 channels] += factor * (codes . values) for one page.
template <int R, int N>
static inline void integer_values(const uint8_t* values, int head_dim, int channel,
                                  const uint8_t* codes, int codes_stride, const float* factors,
                                  int factors_stride, float* o) {
  I acc[R][N];
  KVSIEVE_UNROLL
  for (int r = 0; r < R; r++) KVSIEVE_UNROLL
  for (int n = 0; n < N; n++) acc[r][n] = i_zero();
  for (int t = 0; t < kBlock / 4; t++) {
    B v[N];
    KVSIEVE_UNROLL
    for (int n = 0; n < N; n++)
      v[n] = b_load(values + (static_cast<ptrdiff_t>(t) * head_dim + channel + n * 16) * 4);
    KVSIEVE_UNROLL
    for (int r = 0; r < R; r++) {
      B p = b_broadcast4(codes + static_cast<ptrdiff_t>(r) * codes_stride + t * 4);
      KVSIEVE_UNROLL
      for (int n = 0; n < N; n++) acc[r][n] = dot4(acc[r][n], p, v[n]);
    }
  }
  KVSIEVE_UNROLL
  for (int r = 0; r < R; r++) KVSIEVE_UNROLL
  for (int n = 0; n < N; n++) {
    float* at = o + static_cast<ptrdiff_t>(r) * head_dim + channel + n * 16;
    f_store(at, f_fma(to_float(acc[r][n]), f_set1(factors[r * factors_stride]), f_load(at)));
  }
}

// q4 values of a page as signed bytes in the q8 order, each token's scale sign applied.
static inline void unpack_q4_values(const PageLayout& layout, const uint8_t* page, uint8_t* out) {
  const int d = layout.head_dim;
  const float* scales = reinterpret_cast<const float*>(page + layout.v_scale);
  for (int g = 0; g < d / kGroup; g++) {
    alignas(4) uint8_t negative[kBlock];
    for (int t = 0; t < kBlock; t++) negative[t] = scales[g * kBlock + t] < 0 ? 255 : 0;
    for (int t = 0; t < kBlock / 8; t++)
      for (int n = 0; n < 2; n++) {
        const ptrdiff_t at = (static_cast<ptrdiff_t>(t) * d + g * kGroup + n * 16) * 4;
        B packed = b_load(page + layout.v + at);
        B low = b_negate_where(b_sub(b_low_nibbles(packed), 8), b_broadcast4(negative + 4 * t));
        B high =
            b_negate_where(b_sub(b_high_nibbles(packed), 8), b_broadcast4(negative + 16 + 4 * t));
        b_store(out + at, low);
        b_store(out + static_cast<ptrdiff_t>(4) * d * 4 + at, high);
      }
  }
}

template <int R>
static void integer_values_run(const RunArgs& a, int row) {
  const PageLayout& layout = *a.layout;
  const int d = layout.head_dim, groups = layout.v_groups(), width = d / groups;
  alignas(64) float factors[R][kMaxScaleGroups][kRunBlocks];
  KVSIEVE_UNROLL
  for (int r = 0; r < R; r++)
    for (int g = 0; g < groups; g++) quantize_probabilities(a, row + r, g, factors[r][g]);
  float* o = a.o + static_cast<ptrdiff_t>(row) * d;
  const uint8_t* codes = a.codes + static_cast<ptrdiff_t>(row) * groups * kRunTokens;
  alignas(64) uint8_t unpacked[kBlock * kMaxHeadDim];
  for (int p = 0; p < a.num_pages; p++) {
    if (p < a.num_next && row == 0) ask_for_keys(a, a.next[p]);
    const uint8_t* values = a.pages[p] + layout.v;
    if (layout.v_type == CacheType::q4) {
      unpack_q4_values(layout, a.pages[p], unpacked);
      values = unpacked;
    }
    for (int g = 0; g < groups; g++) {
      const uint8_t* c = codes + g * kRunTokens + p * kBlock;
      const int end = (g + 1) * width, stride = groups * kRunTokens;
      int channel = g * width;
      for (; channel + 32 <= end; channel += 32)
        integer_values<R, 2>(values, d, channel, c, stride, &factors[0][g][p],
                             kMaxScaleGroups * kRunBlocks, o);
      for (; channel < end; channel += 16)
        integer_values<R, 1>(values, d, channel, c, stride, &factors[0][g][p],
                             kMaxScaleGroups * kRunBlocks, o);
    }
  }
}

static inline void float_values_row(const RunArgs& a, int row) {
  const int d = a.layout->head_dim;
  const float* p = a.logits + static_cast<ptrdiff_t>(row) * kRunTokens;
  float* o = a.o + static_cast<ptrdiff_t>(row) * d;
  for (int page = 0; page < a.num_pages; page++) {
    const float* wide = reinterpret_cast<const float*>(a.pages[page] + a.layout->v);
    const uint16_t* narrow = reinterpret_cast<const uint16_t*>(a.pages[page] + a.layout->v);
    const int tokens = visible_in_page(a.visible[row], a.blocks[page]);
    for (int i = 0; i < d; i += 16) {
      F sum = f_load(o + i);
      for (int t = 0; t < tokens; t++) {
        F v = a.layout->v_type == CacheType::f16 ? f_load_f16(narrow + t * d + i)
                                                 : f_load(wide + t * d + i);
        sum = f_fma(f_set1(p[page * kBlock + t]), v, sum);
      }
      f_store(o + i, sum);
    }
  }
}

// -- the run ---------------------------------------------------------------------------------

static void attend_run(const RunArgs& a) {
  const int d = a.layout->head_dim;
  for (int p = 0; p < a.num_pages; p++) {
    if (a.cold) {
      if (p + 1 < a.num_pages) ask_for_keys(a, a.pages[p + 1]);
      ask_for_bytes(a.pages[p] + a.layout->v, a.pages[p] + a.layout->bytes);
    }
    page_logits(*a.layout, a.pages[p], a.q, a.rows, a.logits + p * kBlock, kRunTokens);
  }
  for (int r = 0; r < a.rows; r++) softmax_row(a, r);
  for (int i = 0; i < a.rows * d; i += 16) f_store(a.o + i, f_zero());
  if (a.layout->v_type == CacheType::q8 || a.layout->v_type == CacheType::q4) {
    by_rows(a.rows, [&]<int R>(int row) { integer_values_run<R>(a, row); });
  } else {
    for (int r = 0; r < a.rows; r++) float_values_row(a, r);
  }
}

static void merge(float* o, float* m, float* s, const float* o2, float m2, float s2, int head_dim) {
  if (m2 == kMinusInfinity) return;
  if (*m == kMinusInfinity) {
    for (int i = 0; i < head_dim; i += 16) f_store(o + i, f_load(o2 + i));
    *m = m2;
    *s = s2;
    return;
  }
  const float top = *m > m2 ? *m : m2;
  const float a = exp_one(*m - top), b = exp_one(m2 - top);
  F fa = f_set1(a), fb = f_set1(b);
  for (int i = 0; i < head_dim; i += 16)
    f_store(o + i, f_fma(f_load(o + i), fa, f_load(o2 + i) * fb));
  *s = *s * a + s2 * b;
  *m = top;
}

}  // namespace kvsieve::KVSIEVE_TARGET
