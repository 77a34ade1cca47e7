// 16 lanes as four NEON registers, with the dot-product extension. The meaning of every function is
// given by scalar.h.
#pragma once

#include <arm_neon.h>

#include <cstdint>

namespace kvsieve::KVSIEVE_TARGET {

// Rows per weight tile. With 4, the 8 code vectors (32 registers on their own) are partly read
// again from the stack, and the compiled loop is still the shortest per row and group of 32 inputs:
// 115 instructions for q4 and 170 for q8, against 139 and 191 with 1 row, 116 and 168 with 6 (GCC
// 12).
constexpr int kDenseRows = 4;

struct F {
  float32x4_t v[4];
};
struct I {
  int32x4_t v[4];
};
struct B {
  uint8x16_t v[4];
};

// `expr` for each of the four registers i, the first holding lanes 0 to 3. No loop, whose array of
// registers GCC would keep in memory.
#define KVSIEVE_QUARTERS(expr)                                                     \
  const auto quarter = [&](int i) __attribute__((always_inline)) { return expr; }; \
  return {                                                                         \
    {                                                                              \
      quarter(0), quarter(1), quarter(2), quarter(3)                               \
    }                                                                              \
  }

static inline F f_load(const float* p) { KVSIEVE_QUARTERS(vld1q_f32(p + 4 * i)); }
static inline void f_store(float* p, F a) {
  vst1q_f32(p, a.v[0]);
  vst1q_f32(p + 4, a.v[1]);
  vst1q_f32(p + 8, a.v[2]);
  vst1q_f32(p + 12, a.v[3]);
}
static inline void f_store_first(float* p, F a, int n) {
  float all[16];
  f_store(all, a);
  __builtin_memcpy(p, all, sizeof(float) * n);
}
static inline F f_load_first(const float* p, int n) {
  float all[16] = {};
  __builtin_memcpy(all, p, sizeof(float) * n);
  return f_load(all);
}
static inline F f_load_f16(const uint16_t* p) {
  KVSIEVE_QUARTERS(vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i))));
}
static inline F f_set1(float x) {
  const float32x4_t v = vdupq_n_f32(x);
  return {{v, v, v, v}};
}
static inline F f_zero() { return f_set1(0.0f); }
static inline F operator+(F a, F b) { KVSIEVE_QUARTERS(vaddq_f32(a.v[i], b.v[i])); }
static inline F operator-(F a, F b) { KVSIEVE_QUARTERS(vsubq_f32(a.v[i], b.v[i])); }
static inline F operator*(F a, F b) { KVSIEVE_QUARTERS(vmulq_f32(a.v[i], b.v[i])); }
static inline F operator/(F a, F b) { KVSIEVE_QUARTERS(vdivq_f32(a.v[i], b.v[i])); }
static inline F f_fma(F a, F b, F c) { KVSIEVE_QUARTERS(vfmaq_f32(c.v[i], a.v[i], b.v[i])); }
// a > b ? a : b, so b where either is NaN; fmax would give NaN.
static inline float32x4_t larger(float32x4_t a, float32x4_t b) {
  return vbslq_f32(vcgtq_f32(a, b), a, b);
}
static inline F f_max(F a, F b) { KVSIEVE_QUARTERS(larger(a.v[i], b.v[i])); }
// a < b ? a : b, so b where either is NaN.
static inline F f_min(F a, F b) {
  KVSIEVE_QUARTERS(vbslq_f32(vcltq_f32(a.v[i], b.v[i]), a.v[i], b.v[i]));
}
static inline F f_round(F a) { KVSIEVE_QUARTERS(vrndnq_f32(a.v[i])); }
// a * 2^n for whole -126 <= n <= 127: the factor's exponent field is n + 127.
static inline F f_scale(F a, F n) {
  const int32x4_t bias = vdupq_n_s32(127);
  KVSIEVE_QUARTERS(vmulq_f32(
      a.v[i], vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtq_s32_f32(n.v[i]), bias), 23))));
}
static inline F f_abs(F a) { KVSIEVE_QUARTERS(vabsq_f32(a.v[i])); }
static inline F f_where_gt(F a, F b, F yes, F no) {
  KVSIEVE_QUARTERS(vbslq_f32(vcgtq_f32(a.v[i], b.v[i]), yes.v[i], no.v[i]));
}
static inline F f_keep_first(F a, int n, F fill) {
  static const int32_t numbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const int32x4_t count = vdupq_n_s32(n);
  KVSIEVE_QUARTERS(vbslq_f32(vcltq_s32(vld1q_s32(numbers + 4 * i), count), a.v[i], fill.v[i]));
}
static inline float f_reduce_add(F a) {
  const float32x4_t q =
      vaddq_f32(vaddq_f32(a.v[0], a.v[2]), vaddq_f32(a.v[1], a.v[3]));  // 8, then 4
  const float32x2_t d = vadd_f32(vget_low_f32(q), vget_high_f32(q));
  return vget_lane_f32(d, 0) + vget_lane_f32(d, 1);
}
static inline float f_reduce_max(F a) {
  const float32x4_t q = larger(larger(a.v[0], a.v[2]), larger(a.v[1], a.v[3]));
  const float32x4_t d = larger(q, vextq_f32(q, q, 2));
  return vgetq_lane_f32(larger(d, vextq_f32(d, d, 1)), 0);
}

// Lane i: the maximum of row i.
static inline F f_reduce_max_rows(const float (*rows)[16]) {
  float largest[16];
  for (int i = 0; i < 16; i++) largest[i] = f_reduce_max(f_load(rows[i]));
  return f_load(largest);
}

static inline I i_set1(int x) {
  const int32x4_t v = vdupq_n_s32(x);
  return {{v, v, v, v}};
}
static inline I i_zero() { return i_set1(0); }
static inline I operator+(I a, I b) { KVSIEVE_QUARTERS(vaddq_s32(a.v[i], b.v[i])); }
static inline I operator-(I a, I b) { KVSIEVE_QUARTERS(vsubq_s32(a.v[i], b.v[i])); }
static inline I i_load(const int32_t* p) { KVSIEVE_QUARTERS(vld1q_s32(p + 4 * i)); }
static inline void i_store(int32_t* p, I a) {
  vst1q_s32(p, a.v[0]);
  vst1q_s32(p + 4, a.v[1]);
  vst1q_s32(p + 8, a.v[2]);
  vst1q_s32(p + 12, a.v[3]);
}
static inline F to_float(I a) { KVSIEVE_QUARTERS(vcvtq_f32_s32(a.v[i])); }
static inline I round_to_int(F a) { KVSIEVE_QUARTERS(vcvtnq_s32_f32(a.v[i])); }
// Lanes to saturated words, in order.
static inline int16x8_t pack_words(int32x4_t a, int32x4_t b) {
  return vcombine_s16(vqmovn_s32(a), vqmovn_s32(b));
}
static inline void store_i8(int8_t* p, I a) {
  vst1_s8(p, vqmovn_s16(pack_words(a.v[0], a.v[1])));
  vst1_s8(p + 8, vqmovn_s16(pack_words(a.v[2], a.v[3])));
}
static inline void store_u8(uint8_t* p, I a) {
  vst1_u8(p, vqmovun_s16(pack_words(a.v[0], a.v[1])));
  vst1_u8(p + 8, vqmovun_s16(pack_words(a.v[2], a.v[3])));
}

static inline B b_load(const void* p) {
  const uint8_t* bytes = static_cast<const uint8_t*>(p);
  KVSIEVE_QUARTERS(vld1q_u8(bytes + 16 * i));
}
static inline void b_store(void* p, B a) {
  uint8_t* bytes = static_cast<uint8_t*>(p);
  vst1q_u8(bytes, a.v[0]);
  vst1q_u8(bytes + 16, a.v[1]);
  vst1q_u8(bytes + 32, a.v[2]);
  vst1q_u8(bytes + 48, a.v[3]);
}
static inline B b_broadcast4(const void* p) {
  uint32_t x;
  __builtin_memcpy(&x, p, 4);
  const uint8x16_t v = vreinterpretq_u8_u32(vdupq_n_u32(x));
  return {{v, v, v, v}};
}
static inline B b_low_nibbles(B a) { KVSIEVE_QUARTERS(vandq_u8(a.v[i], vdupq_n_u8(15))); }
static inline B b_high_nibbles(B a) { KVSIEVE_QUARTERS(vshrq_n_u8(a.v[i], 4)); }
static inline B b_sub(B a, int8_t x) {
  KVSIEVE_QUARTERS(vsubq_u8(a.v[i], vdupq_n_u8(static_cast<uint8_t>(x))));
}
static inline B b_negate_where(B a, B mask) {  // mask bytes are 0 or 255
  KVSIEVE_QUARTERS(vsubq_u8(veorq_u8(a.v[i], mask.v[i]), mask.v[i]));
}

// The extension multiplies bytes of equal signedness. As a signed byte, u with its top bit flipped
// is u - 128, so 128 times the sum of s is missing: -128 is a signed byte, +128 is not, so minus
// that sum is made and subtracted. It depends on s alone: rows or vectors that share s share it.
static inline int32x4_t dot4_quarter(int32x4_t acc, uint8x16_t u, uint8x16_t s) {
  const int8x16_t s8 = vreinterpretq_s8_u8(s);
  const int32x4_t missing = vdotq_s32(vdupq_n_s32(0), s8, vdupq_n_s8(-128));
  const int8x16_t u8 = vreinterpretq_s8_u8(veorq_u8(u, vdupq_n_u8(128)));
  return vsubq_s32(vdotq_s32(acc, u8, s8), missing);
}
static inline I dot4(I acc, B u, B s) { KVSIEVE_QUARTERS(dot4_quarter(acc.v[i], u.v[i], s.v[i])); }
// u <= 15 is the same signed or not.
static inline I dot4_nibble(I acc, B u, B s) {
  KVSIEVE_QUARTERS(vdotq_s32(acc.v[i], vreinterpretq_s8_u8(u.v[i]), vreinterpretq_s8_u8(s.v[i])));
}

#undef KVSIEVE_QUARTERS

}  // namespace kvsieve::KVSIEVE_TARGET
