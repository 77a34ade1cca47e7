// 16 lanes of AVX-512. The meaning of every function is given by scalar.h.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace kvsieve::KVSIEVE_TARGET {

constexpr int kDenseRows =
    8;  // rows per weight tile: 8 sums + 8 code vectors + 2 partial sums < 32

struct F {
  __m512 v;
};
struct I {
  __m512i v;
};
struct B {
  __m512i v;
};

static inline F f_load(const float* p) { return {_mm512_loadu_ps(p)}; }
static inline void f_store(float* p, F a) { _mm512_storeu_ps(p, a.v); }
static inline __mmask16 first_lanes(int n) { return static_cast<__mmask16>((1u << n) - 1); }
static inline void f_store_first(float* p, F a, int n) {
  _mm512_mask_storeu_ps(p, first_lanes(n), a.v);
}
static inline F f_load_first(const float* p, int n) {
  return {_mm512_maskz_loadu_ps(first_lanes(n), p)};
}
static inline F f_load_f16(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
static inline F f_set1(float x) { return {_mm512_set1_ps(x)}; }
static inline F f_zero() { return {_mm512_setzero_ps()}; }
static inline F operator+(F a, F b) { return {_mm512_add_ps(a.v, b.v)}; }
static inline F operator-(F a, F b) { return {_mm512_sub_ps(a.v, b.v)}; }
static inline F operator*(F a, F b) { return {_mm512_mul_ps(a.v, b.v)}; }
static inline F operator/(F a, F b) { return {_mm512_div_ps(a.v, b.v)}; }
static inline F f_fma(F a, F b, F c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
static inline F f_max(F a, F b) { return {_mm512_max_ps(a.v, b.v)}; }
static inline F f_min(F a, F b) { return {_mm512_min_ps(a.v, b.v)}; }
static inline F f_round(F a) {
  return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
static inline F f_scale(F a, F n) { return {_mm512_scalef_ps(a.v, n.v)}; }
static inline F f_abs(F a) { return {_mm512_abs_ps(a.v)}; }
static inline F f_keep_first(F a, int n, F fill) {
  return {_mm512_mask_blend_ps(first_lanes(n), fill.v, a.v)};
}
static inline F f_where_gt(F a, F b, F yes, F no) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ), no.v, yes.v)};
}
static inline float f_reduce_add(F a) {
  __m256 h = _mm256_add_ps(_mm512_castps512_ps256(a.v), _mm512_extractf32x8_ps(a.v, 1));
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_shuffle_ps(q, q, 1)));
}
static inline float f_reduce_max(F a) { return _mm512_reduce_max_ps(a.v); }
// Two rows in, their halves folded: (a.lo max a.hi, b.lo max b.hi), and so on down to one lane
// each.
static inline F f_reduce_max_rows(const float (*rows)[16]) {
  __m512 quarters[4];
  for (int e = 0; e < 4; e++) {
    __m512 eights[2];
    for (int i = 0; i < 2; i++) {
      __m512 a = _mm512_loadu_ps(rows[8 * i + e]), b = _mm512_loadu_ps(rows[8 * i + e + 4]);
      eights[i] = _mm512_max_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    }
    quarters[e] = _mm512_max_ps(_mm512_shuffle_f32x4(eights[0], eights[1], 0x88),
                                _mm512_shuffle_f32x4(eights[0], eights[1], 0xdd));
  }
  __m512 pairs[2];
  for (int i = 0; i < 2; i++) {
    __m512 a = quarters[2 * i], b = quarters[2 * i + 1];
    pairs[i] = _mm512_max_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
  }
  return {_mm512_max_ps(_mm512_shuffle_ps(pairs[0], pairs[1], 0x88),
                        _mm512_shuffle_ps(pairs[0], pairs[1], 0xdd))};
}

static inline I i_zero() { return {_mm512_setzero_si512()}; }
static inline I i_set1(int x) { return {_mm512_set1_epi32(x)}; }
static inline I operator+(I a, I b) { return {_mm512_add_epi32(a.v, b.v)}; }
static inline I operator-(I a, I b) { return {_mm512_sub_epi32(a.v, b.v)}; }
static inline I i_load(const int32_t* p) { return {_mm512_loadu_si512(p)}; }
static inline void i_store(int32_t* p, I a) { _mm512_storeu_si512(p, a.v); }
static inline F to_float(I a) { return {_mm512_cvtepi32_ps(a.v)}; }
static inline I round_to_int(F a) {
  return {_mm512_cvt_roundps_epi32(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
static inline void store_i8(int8_t* p, I a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(a.v));
}
static inline void store_u8(uint8_t* p, I a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtusepi32_epi8(a.v));
}

static inline B b_load(const void* p) { return {_mm512_loadu_si512(p)}; }
static inline void b_store(void* p, B a) { _mm512_storeu_si512(p, a.v); }
static inline B b_broadcast4(const void* p) {
  int32_t x;
  __builtin_memcpy(&x, p, 4);
  return {_mm512_set1_epi32(x)};
}
static inline B b_low_nibbles(B a) { return {_mm512_and_si512(a.v, _mm512_set1_epi8(15))}; }
static inline B b_high_nibbles(B a) {
  return {_mm512_and_si512(_mm512_srli_epi16(a.v, 4), _mm512_set1_epi8(15))};
}
static inline B b_sub(B a, int8_t x) { return {_mm512_sub_epi8(a.v, _mm512_set1_epi8(x))}; }
static inline B b_negate_where(B a, B mask) {  // mask bytes are 0 or 255
  return {_mm512_sub_epi8(_mm512_xor_si512(a.v, mask.v), mask.v)};
}

#if defined(__AVX512VNNI__)
static inline I dot4(I acc, B u, B s) { return {_mm512_dpbusd_epi32(acc.v, u.v, s.v)}; }
static inline I dot4_nibble(I acc, B u, B s) { return dot4(acc, u, s); }
#else
// Bytes widened to 16 bits: exact for any operands.
static inline I dot4(I acc, B u, B s) {
  const __m512i low = _mm512_set1_epi16(255);
  __m512i even = _mm512_madd_epi16(_mm512_and_si512(u.v, low),
                                   _mm512_srai_epi16(_mm512_slli_epi16(s.v, 8), 8));
  __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16(u.v, 8), _mm512_srai_epi16(s.v, 8));
  return {_mm512_add_epi32(acc.v, _mm512_add_epi32(even, odd))};
}
// u <= 15: 2 * 15 * 127 fits 16 bits, so the saturating product never saturates.
static inline I dot4_nibble(I acc, B u, B s) {
  __m512i pairs = _mm512_maddubs_epi16(u.v, s.v);
  return {_mm512_add_epi32(acc.v, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)))};
}
#endif

}  // namespace kvsieve::KVSIEVE_TARGET
