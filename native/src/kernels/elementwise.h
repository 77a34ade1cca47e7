// Row operations: exponential, norm, gates, rotation, quantisation, and what ends attention.
#pragma once

#include <cmath>

#include "kvsieve/kernels.h"

namespace kvsieve::KVSIEVE_TARGET {

// e^x, relative error below 2e-7; 0 below -87, e^88 above 88. The only exponential in the core.
static inline F f_exp(F x) {
  x = f_min(x, f_set1(88.0f));
  F n = f_round(x * f_set1(1.44269504f));
  // x - n ln 2 in two steps: 0.693359375 has 9 bits, so n times it is exact.
  F r = f_fma(n, f_set1(-0.693359375f), x);
  r = f_fma(n, f_set1(2.12194440e-4f), r);
  F p = f_set1(1.0f / 720);
  p = f_fma(p, r, f_set1(1.0f / 120));
  p = f_fma(p, r, f_set1(1.0f / 24));
  p = f_fma(p, r, f_set1(1.0f / 6));
  p = f_fma(p, r, f_set1(0.5f));
  p = f_fma(p, r, f_set1(1.0f));
  p = f_fma(p, r, f_set1(1.0f));
  return f_where_gt(f_set1(-87.0f), x, f_zero(), f_scale(p, n));
}

static float exp_one(float x) {
  float all[16];
  f_store(all, f_exp(f_set1(x)));
  return all[0];
}

// Scale that maps `largest` to 127, and its inverse; below 2^-100 a group counts as zero, so the
// inverse stays finite.
struct Scale {
  float scale, inverse;
};
static inline Scale scale_for(float largest) {
  if (!(largest > 0x1p-100f)) return {0.0f, 0.0f};
  return {largest / 127.0f, 127.0f / largest};
}

// NaN and infinity show up in the sum of x * 0.
static inline bool all_finite(const float* x, int n) {
  F sum = f_zero();
  for (int i = 0; i < n; i += 16) sum = sum + f_load(x + i) * f_zero();
  return f_reduce_add(sum) == 0.0f;
}

static bool quantize_row(const Activations& x, int row, int begin, int end) {
  const int groups = x.cols / kGroup;
  const float* values = x.values + static_cast<size_t>(row) * x.cols;
  int8_t* codes = x.codes + static_cast<size_t>(row) * x.cols;
  for (int g = begin; g < end; g++) {
    F a = f_load(values + g * kGroup), b = f_load(values + g * kGroup + 16);
    Scale s = scale_for(f_reduce_max(f_max(f_abs(a), f_abs(b))));
    I qa = round_to_int(a * f_set1(s.inverse)), qb = round_to_int(b * f_set1(s.inverse));
    store_i8(codes + g * kGroup, qa);
    store_i8(codes + g * kGroup + 16, qb);
    int32_t lanes[16], sum = 0;
    i_store(lanes, qa + qb);
    for (int32_t lane : lanes) sum += lane;
    size_t at = static_cast<size_t>(row) * groups + g;
    x.scale[at] = s.scale;
    x.codes_sum[at] = sum;
    x.sum[at] = s.scale * static_cast<float>(sum);
  }
  return all_finite(values + begin * kGroup, (end - begin) * kGroup);
}

static void rms_norm(const float* x, const float* weight, float eps, int n, float* y) {
  F squares = f_zero();
  for (int i = 0; i < n; i += 16) {
    F v = f_load(x + i);
    squares = f_fma(v, v, squares);
  }
  F inverse = f_set1(1.0f / std::sqrt(f_reduce_add(squares) / static_cast<float>(n) + eps));
  for (int i = 0; i < n; i += 16) f_store(y + i, f_load(x + i) * inverse * f_load(weight + i));
}

static void silu_mul(const float* gate, const float* up, int n, float* y) {
  for (int i = 0; i < n; i += 16) {
    F g = f_load(gate + i);
    F sigmoid = f_set1(1.0f) / (f_set1(1.0f) + f_exp(f_zero() - g));
    f_store(y + i, g * sigmoid * f_load(up + i));
  }
}

// gelu(gate) * up in gelu's tanh form: (1 + tanh(z)) / 2 = 1 / (1 + e^-2z), with
// z = sqrt(2 / pi) (g + 0.044715 g^3).
static void gelu_mul(const float* gate, const float* up, int n, float* y) {
  for (int i = 0; i < n; i += 16) {
    F g = f_load(gate + i);
    F inner = f_fma(g * g * g, f_set1(0.044715f), g) * f_set1(-2 * 0.797884561f);
    F share = f_set1(1.0f) / (f_set1(1.0f) + f_exp(inner));
    f_store(y + i, g * share * f_load(up + i));
  }
}

// Rotates the first rope_dim channels of one head; pairs (2i, 2i+1), or (i, i + rope_dim/2).
static void rope(float* x, const float* cos, const float* sin, int rope_dim, bool interleaved) {
  const int half = rope_dim / 2;
  for (int i = 0; i < half; i++) {
    float& a = x[interleaved ? 2 * i : i];
    float& b = x[interleaved ? 2 * i + 1 : i + half];
    float c = cos[i], s = sin[i], before = a;
    a = before * c - b * s;
    b = before * s + b * c;
  }
}

static void finish(float* o, float s, int head_dim) {
  F total = f_set1(s);
  for (int i = 0; i < head_dim; i += 16) f_store(o + i, f_load(o + i) / total);
}

static void add_importance(const float* p, float factor, int n, int32_t* acc) {
  F f = f_set1(factor), unit = f_set1(0x1p24f);
  for (int i = 0; i < n; i += 16)
    i_store(acc + i, i_load(acc + i) + round_to_int(f_load(p + i) * f * unit));
}

}  // namespace kvsieve::KVSIEVE_TARGET
