// 16 lanes as two AVX2 registers, with or without AVX-VNNI. The meaning of every function is given
// by scalar.h.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace kvsieve::KVSIEVE_TARGET {

constexpr int kDenseRows = 4;  // rows per weight tile: 4 sums of 2 registers, the rest for codes

struct F {
  __m256 lo, hi;
};
struct I {
  __m256i lo, hi;
};
struct B {
  __m256i lo, hi;
};

static inline F f_load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline void f_store(float* p, F a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
static inline F f_lane_numbers() {
  return {_mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7), _mm256_setr_ps(8, 9, 10, 11, 12, 13, 14, 15)};
}
static inline void f_store_first(float* p, F a, int n) {
  alignas(32) float all[16];
  f_store(all, a);
  __builtin_memcpy(p, all, sizeof(float) * n);
}
static inline F f_load_first(const float* p, int n) {
  alignas(32) float all[16] = {};
  __builtin_memcpy(all, p, sizeof(float) * n);
  return f_load(all);
}
static inline F f_load_f16(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
static inline F f_set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static inline F f_zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
static inline F operator+(F a, F b) {
  return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)};
}
static inline F operator-(F a, F b) {
  return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)};
}
static inline F operator*(F a, F b) {
  return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)};
}
static inline F operator/(F a, F b) {
  return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)};
}
static inline F f_fma(F a, F b, F c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
static inline F f_max(F a, F b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
static inline F f_min(F a, F b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
static inline F f_round(F a) {
  constexpr int kMode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(a.lo, kMode), _mm256_round_ps(a.hi, kMode)};
}
static inline __m256 scale_half(__m256 a, __m256 n) {
  __m256i bits = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_mul_ps(a, _mm256_castsi256_ps(_mm256_slli_epi32(bits, 23)));
}
static inline F f_scale(F a, F n) { return {scale_half(a.lo, n.lo), scale_half(a.hi, n.hi)}; }
static inline F f_abs(F a) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)};
}
static inline F f_where_gt(F a, F b, F yes, F no) {
  return {_mm256_blendv_ps(no.lo, yes.lo, _mm256_cmp_ps(a.lo, b.lo, _CMP_GT_OQ)),
          _mm256_blendv_ps(no.hi, yes.hi, _mm256_cmp_ps(a.hi, b.hi, _CMP_GT_OQ))};
}
static inline F f_keep_first(F a, int n, F fill) {
  return f_where_gt(f_set1(static_cast<float>(n)), f_lane_numbers(), a, fill);
}
static inline float f_reduce_add(F a) {
  __m256 h = _mm256_add_ps(a.lo, a.hi);
  __m128 q = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_add_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_add_ss(q, _mm_shuffle_ps(q, q, 1)));
}
static inline float f_reduce_max(F a) {
  __m256 h = _mm256_max_ps(a.lo, a.hi);
  __m128 q = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
  q = _mm_max_ps(q, _mm_movehl_ps(q, q));
  return _mm_cvtss_f32(_mm_max_ss(q, _mm_shuffle_ps(q, q, 1)));
}

static inline F f_reduce_max_rows(const float (*rows)[16]) {
  alignas(32) float largest[16];
  for (int i = 0; i < 16; i++) largest[i] = f_reduce_max(f_load(rows[i]));
  return f_load(largest);
}

static inline I i_zero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
static inline I i_set1(int x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
static inline I operator+(I a, I b) {
  return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)};
}
static inline I operator-(I a, I b) {
  return {_mm256_sub_epi32(a.lo, b.lo), _mm256_sub_epi32(a.hi, b.hi)};
}
static inline __m256i load256(const void* p) {
  return _mm256_loadu_si256(static_cast<const __m256i*>(p));
}
static inline void store256(void* p, __m256i a) {
  _mm256_storeu_si256(static_cast<__m256i*>(p), a);
}
static inline I i_load(const int32_t* p) { return {load256(p), load256(p + 8)}; }
static inline void i_store(int32_t* p, I a) {
  store256(p, a.lo);
  store256(p + 8, a.hi);
}
static inline F to_float(I a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
static inline I round_to_int(F a) {  // MXCSR is left at its default: to nearest, half to even
  return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)};
}
static inline __m256i pack_words(I a) {  // 16 lanes to 16 words, in order
  return _mm256_permute4x64_epi64(_mm256_packs_epi32(a.lo, a.hi), 0xd8);
}
static inline void store_i8(int8_t* p, I a) {
  __m256i w = pack_words(a);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm_packs_epi16(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1)));
}
static inline void store_u8(uint8_t* p, I a) {
  __m256i w = pack_words(a);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm_packus_epi16(_mm256_castsi256_si128(w), _mm256_extracti128_si256(w, 1)));
}

static inline B b_load(const void* p) {
  return {load256(p), load256(static_cast<const char*>(p) + 32)};
}
static inline void b_store(void* p, B a) {
  store256(p, a.lo);
  store256(static_cast<char*>(p) + 32, a.hi);
}
static inline B b_broadcast4(const void* p) {
  int32_t x;
  __builtin_memcpy(&x, p, 4);
  return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)};
}
static inline B b_low_nibbles(B a) {
  const __m256i mask = _mm256_set1_epi8(15);
  return {_mm256_and_si256(a.lo, mask), _mm256_and_si256(a.hi, mask)};
}
static inline B b_high_nibbles(B a) {
  return b_low_nibbles({_mm256_srli_epi16(a.lo, 4), _mm256_srli_epi16(a.hi, 4)});
}
static inline B b_sub(B a, int8_t x) {
  const __m256i d = _mm256_set1_epi8(x);
  return {_mm256_sub_epi8(a.lo, d), _mm256_sub_epi8(a.hi, d)};
}
static inline B b_negate_where(B a, B mask) {  // mask bytes are 0 or 255
  return {_mm256_sub_epi8(_mm256_xor_si256(a.lo, mask.lo), mask.lo),
          _mm256_sub_epi8(_mm256_xor_si256(a.hi, mask.hi), mask.hi)};
}

#if defined(__AVXVNNI__) || (defined(__AVX512VNNI__) && defined(__AVX512VL__))
static inline __m256i dot4_half(__m256i acc, __m256i u, __m256i s) {
#if defined(__AVXVNNI__)
  return _mm256_dpbusd_avx_epi32(acc, u, s);
#else
  return _mm256_dpbusd_epi32(acc, u, s);
#endif
}
static inline __m256i dot4_nibble_half(__m256i acc, __m256i u, __m256i s) {
  return dot4_half(acc, u, s);
}
#else
// Bytes widened to 16 bits: exact for any operands.
static inline __m256i dot4_half(__m256i acc, __m256i u, __m256i s) {
  const __m256i low = _mm256_set1_epi16(255);
  __m256i even =
      _mm256_madd_epi16(_mm256_and_si256(u, low), _mm256_srai_epi16(_mm256_slli_epi16(s, 8), 8));
  __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(u, 8), _mm256_srai_epi16(s, 8));
  return _mm256_add_epi32(acc, _mm256_add_epi32(even, odd));
}
// u <= 15: 2 * 15 * 127 fits 16 bits, so the saturating product never saturates.
static inline __m256i dot4_nibble_half(__m256i acc, __m256i u, __m256i s) {
  __m256i pairs = _mm256_maddubs_epi16(u, s);
  return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
#endif
static inline I dot4(I acc, B u, B s) {
  return {dot4_half(acc.lo, u.lo, s.lo), dot4_half(acc.hi, u.hi, s.hi)};
}
static inline I dot4_nibble(I acc, B u, B s) {
  return {dot4_nibble_half(acc.lo, u.lo, s.lo), dot4_nibble_half(acc.hi, u.hi, s.hi)};
}

}  // namespace kvsieve::KVSIEVE_TARGET
