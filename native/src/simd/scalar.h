// 16 lanes in plain C++: the meaning of every function that an instruction set implements.
#pragma once

#include <cmath>
#include <cstdint>

#include "kvsieve/half.h"

namespace kvsieve::KVSIEVE_TARGET {

constexpr int kDenseRows = 4;

struct F {
  float v[16];
};
struct I {
  int32_t v[16];
};
struct B {
  uint8_t v[64];
};

#define KVSIEVE_LANES(R, expr)                  \
  R r;                                          \
  for (int i = 0; i < 16; i++) r.v[i] = (expr); \
  return r

static inline F f_load(const float* p) { KVSIEVE_LANES(F, p[i]); }
static inline void f_store(float* p, F a) {
  for (int i = 0; i < 16; i++) p[i] = a.v[i];
}
static inline void f_store_first(float* p, F a, int n) {
  for (int i = 0; i < n; i++) p[i] = a.v[i];
}
static inline F f_load_first(const float* p, int n) { KVSIEVE_LANES(F, i < n ? p[i] : 0.0f); }
static inline F f_load_f16(const uint16_t* p) { KVSIEVE_LANES(F, half_to_float(p[i])); }
static inline F f_set1(float x) { KVSIEVE_LANES(F, x); }
static inline F f_zero() { return f_set1(0.0f); }
static inline F operator+(F a, F b) { KVSIEVE_LANES(F, a.v[i] + b.v[i]); }
static inline F operator-(F a, F b) { KVSIEVE_LANES(F, a.v[i] - b.v[i]); }
static inline F operator*(F a, F b) { KVSIEVE_LANES(F, a.v[i] * b.v[i]); }
static inline F operator/(F a, F b) { KVSIEVE_LANES(F, a.v[i] / b.v[i]); }
static inline F f_fma(F a, F b, F c) { KVSIEVE_LANES(F, std::fma(a.v[i], b.v[i], c.v[i])); }
static inline F f_max(F a, F b) { KVSIEVE_LANES(F, a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
static inline F f_min(F a, F b) { KVSIEVE_LANES(F, a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
static inline F f_round(F a) { KVSIEVE_LANES(F, std::nearbyintf(a.v[i])); }  // half to even
// a * 2^n for whole -126 <= n <= 127; elsewhere anything, but no trap.
static inline F f_scale(F a, F n) {
  KVSIEVE_LANES(
      F, n.v[i] >= -126 && n.v[i] <= 127 ? std::ldexp(a.v[i], static_cast<int>(n.v[i])) : 0.0f);
}
static inline F f_abs(F a) { KVSIEVE_LANES(F, std::fabs(a.v[i])); }
static inline F f_keep_first(F a, int n, F fill) { KVSIEVE_LANES(F, i < n ? a.v[i] : fill.v[i]); }
static inline F f_where_gt(F a, F b, F yes, F no) {
  KVSIEVE_LANES(F, a.v[i] > b.v[i] ? yes.v[i] : no.v[i]);
}
// The canonical order of a sum over lanes: halves folded onto each other, 8, 4, 2, 1.
static inline float f_reduce_add(F a) {
  for (int half = 8; half; half /= 2)
    for (int i = 0; i < half; i++) a.v[i] += a.v[i + half];
  return a.v[0];
}
static inline float f_reduce_max(F a) {
  for (int half = 8; half; half /= 2)
    for (int i = 0; i < half; i++) a.v[i] = a.v[i] > a.v[i + half] ? a.v[i] : a.v[i + half];
  return a.v[0];
}

// Lane i: the maximum of row i.
static inline F f_reduce_max_rows(const float (*rows)[16]) {
  KVSIEVE_LANES(F, f_reduce_max(f_load(rows[i])));
}

static inline I i_set1(int x) { KVSIEVE_LANES(I, x); }
static inline I i_zero() { return i_set1(0); }
static inline I operator+(I a, I b) { KVSIEVE_LANES(I, a.v[i] + b.v[i]); }
static inline I operator-(I a, I b) { KVSIEVE_LANES(I, a.v[i] - b.v[i]); }
static inline I i_load(const int32_t* p) { KVSIEVE_LANES(I, p[i]); }
static inline void i_store(int32_t* p, I a) {
  for (int i = 0; i < 16; i++) p[i] = a.v[i];
}
static inline F to_float(I a) { KVSIEVE_LANES(F, static_cast<float>(a.v[i])); }
static inline I round_to_int(F a) {  // half to even; values are within int32
  KVSIEVE_LANES(I, static_cast<int32_t>(std::nearbyintf(a.v[i])));
}
static inline void store_i8(int8_t* p, I a) {  // saturating
  for (int i = 0; i < 16; i++)
    p[i] = static_cast<int8_t>(a.v[i] > 127 ? 127 : a.v[i] < -128 ? -128 : a.v[i]);
}
static inline void store_u8(uint8_t* p, I a) {  // saturating; values are not negative
  for (int i = 0; i < 16; i++) p[i] = static_cast<uint8_t>(a.v[i] > 255 ? 255 : a.v[i]);
}

static inline B b_load(const void* p) {
  B r;
  __builtin_memcpy(r.v, p, 64);
  return r;
}
static inline void b_store(void* p, B a) { __builtin_memcpy(p, a.v, 64); }
static inline B b_broadcast4(const void* p) {
  B r;
  for (int i = 0; i < 16; i++) __builtin_memcpy(r.v + 4 * i, p, 4);
  return r;
}
static inline B b_low_nibbles(B a) {
  for (uint8_t& x : a.v) x &= 15;
  return a;
}
static inline B b_high_nibbles(B a) {
  for (uint8_t& x : a.v) x >>= 4;
  return a;
}
static inline B b_sub(B a, int8_t d) {
  for (uint8_t& x : a.v) x = static_cast<uint8_t>(x - d);
  return a;
}
static inline B b_negate_where(B a, B mask) {  // mask bytes are 0 or 255
  for (int i = 0; i < 64; i++) a.v[i] = static_cast<uint8_t>((a.v[i] ^ mask.v[i]) - mask.v[i]);
  return a;
}
// acc[i] += sum over 4 bytes of unsigned u times signed s, exact in 32 bits.
static inline I dot4(I acc, B u, B s) {
  for (int i = 0; i < 16; i++)
    for (int j = 0; j < 4; j++)
      acc.v[i] += static_cast<int>(u.v[4 * i + j]) * static_cast<int8_t>(s.v[4 * i + j]);
  return acc;
}
// The same where every byte of u is at most 15.
static inline I dot4_nibble(I acc, B u, B s) { return dot4(acc, u, s); }

#undef KVSIEVE_LANES

}  // namespace kvsieve::KVSIEVE_TARGET
