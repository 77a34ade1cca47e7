// Writing a token into a page, and making a query row ready for the keys' type.
#pragma once

#include <cmath>

#include "kvsieve/half.h"
#include "kvsieve/kernels.h"

namespace kvsieve::KVSIEVE_TARGET {

static inline float largest_magnitude(const float* x, int n) {
  F largest = f_zero();
  for (int i = 0; i < n; i += 16) largest = f_max(f_abs(f_load(x + i)), largest);
  return f_reduce_max(largest);
}

// scale = max|x| / 127, code = rint(x / scale); 0 for a zero row. Returns the scale.
static inline float quantize_q8(const float* x, int n, int8_t* codes) {
  const float scale = largest_magnitude(x, n) / 127.0f;
  const F divisor = f_set1(scale > 0 ? scale : 1.0f);
  for (int i = 0; i < n; i += 16) {
    // A subnormal scale is coarse: the quotient may pass 127.
    F quotient = f_max(f_load(x + i) / divisor, f_set1(-127.0f));
    quotient = f_where_gt(quotient, f_set1(127.0f), f_set1(127.0f), quotient);
    store_i8(codes + i, round_to_int(quotient));
  }
  return scale;
}

// Per 32 values: scale = m / -8 with m the value of largest magnitude (the first among equals),
// code = rint(x / scale) in -8..7. Codes are written +8.
static inline float quantize_q4(const float* x, uint8_t* codes) {
  float m = 0;
  for (int i = 0; i < kGroup; i++)
    if (std::fabs(x[i]) > std::fabs(m)) m = x[i];
  const float scale = m != 0 ? m / -8.0f : 0.0f;  // not -0
  for (int i = 0; i < kGroup; i++) {
    float code = scale != 0 ? std::nearbyintf(x[i] / scale) : 0.0f;
    code = code < -8 ? -8 : code > 7 ? 7 : code;
    codes[i] = static_cast<uint8_t>(static_cast<int>(code) + 8);
  }
  return scale;
}

static inline void set_nibble(uint8_t* at, bool high, uint8_t code) {
  *at = high ? static_cast<uint8_t>((*at & 0x0f) | code << 4)
             : static_cast<uint8_t>((*at & 0xf0) | code);
}

static void append_keys(const PageLayout& layout, uint8_t* page, int slot, const float* k) {
  const int d = layout.head_dim;
  float* scales = reinterpret_cast<float*>(page + layout.k_scale);
  if (layout.k_type == CacheType::q8) {
    int8_t codes[kMaxHeadDim];
    scales[slot] = quantize_q8(k, d, codes);
    for (int i = 0; i < d; i++)
      page[(i / 4 * kBlock + slot) * 4 + i % 4] = static_cast<uint8_t>(codes[i] + 128);
  } else if (layout.k_type == CacheType::q4) {
    uint8_t codes[kGroup];
    for (int g = 0; g < d / kGroup; g++) {
      scales[g * kBlock + slot] = quantize_q4(k + g * kGroup, codes);
      for (int i = 0; i < kGroup; i++) {
        const int dim = g * kGroup + i, chunk = dim / 4, half = d / 8;
        set_nibble(page + (chunk % half * kBlock + slot) * 4 + dim % 4, chunk >= half, codes[i]);
      }
    }
  } else if (layout.k_type == CacheType::f16) {
    uint16_t* out = reinterpret_cast<uint16_t*>(page);
    for (int i = 0; i < d; i++) out[i * kBlock + slot] = float_to_half(k[i]);
  } else {
    float* out = reinterpret_cast<float*>(page);
    for (int i = 0; i < d; i++) out[i * kBlock + slot] = k[i];
  }
}

static void append_values(const PageLayout& layout, uint8_t* page, int slot, const float* v) {
  const int d = layout.head_dim;
  float* scales = reinterpret_cast<float*>(page + layout.v_scale);
  uint8_t* values = page + layout.v;
  if (layout.v_type == CacheType::q8) {
    int8_t codes[kMaxHeadDim];
    scales[slot] = quantize_q8(v, d, codes);
    for (int i = 0; i < d; i++)
      values[(slot / 4 * d + i) * 4 + slot % 4] = static_cast<uint8_t>(codes[i]);
  } else if (layout.v_type == CacheType::q4) {
    uint8_t codes[kGroup];
    for (int g = 0; g < d / kGroup; g++) {
      scales[g * kBlock + slot] = quantize_q4(v + g * kGroup, codes);
      for (int i = 0; i < kGroup; i++)
        set_nibble(values + (slot / 4 % 4 * d + g * kGroup + i) * 4 + slot % 4, slot >= 16,
                   codes[i]);
    }
  } else if (layout.v_type == CacheType::f16) {
    uint16_t* out = reinterpret_cast<uint16_t*>(values) + slot * d;
    for (int i = 0; i < d; i++) out[i] = float_to_half(v[i]);
  } else {
    __builtin_memcpy(values + sizeof(float) * slot * d, v, sizeof(float) * d);
  }
}

// Whether a row is finite, and stays so in the type it is stored in.
static inline bool fits(const float* x, int n, CacheType type) {
  return all_finite(x, n) && (type != CacheType::f16 || largest_magnitude(x, n) < 65520.0f);
}

static bool append(const PageLayout& layout, uint8_t* page, int slot, const float* k,
                   const float* v) {
  if (!fits(k, layout.head_dim, layout.k_type) || !fits(v, layout.head_dim, layout.v_type))
    return false;
  append_keys(layout, page, slot, k);
  append_values(layout, page, slot, v);
  return true;
}

static bool fold_query(float* q, float scale, int head_dim, int groups, int8_t* codes,
                       float* q_scale, int32_t* codes_sum) {
  if (!all_finite(q, head_dim)) return false;
  for (int i = 0; i < head_dim; i += 16) f_store(q + i, f_load(q + i) * f_set1(scale));
  *q_scale = quantize_q8(q, head_dim, codes);
  const int width = head_dim / groups;
  for (int g = 0; g < groups; g++) {
    codes_sum[g] = 0;
    for (int i = 0; i < width; i++) codes_sum[g] += codes[g * width + i];
  }
  return true;
}

}  // namespace kvsieve::KVSIEVE_TARGET
