// Half precision in software, the same bits on every compiler and processor.
#pragma once

#include <cstdint>
#include <cstring>

namespace kvsieve {

static inline float half_to_float(uint16_t h) {
  uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16, magnitude = h & 0x7fff, bits;
  if (magnitude >= 0x7c00) {  // infinity, NaN
    bits = sign | 0x7f800000 | (magnitude & 0x3ff) << 13;
  } else if (magnitude >= 0x400) {
    bits = sign | ((magnitude << 13) + (112u << 23));
  } else {  // subnormal: magnitude * 2^-24 is exact
    float x = static_cast<float>(magnitude) * 0x1p-24f;
    std::memcpy(&bits, &x, 4);
    bits |= sign;
  }
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

// Round to nearest, half to even; too large becomes infinity.
static inline uint16_t float_to_half(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
  bits &= 0x7fffffff;
  if (bits >= 0x7f800000) return sign | (bits > 0x7f800000 ? 0x7e00 : 0x7c00);
  if (bits >= 0x477ff000) return sign | 0x7c00;  // 65520 and beyond
  if (bits < 0x38800000) {                       // below 2^-14: subnormal, or zero
    float magnitude;
    std::memcpy(&magnitude, &bits, 4);
    // Adding 0.5 leaves the value rounded to multiples of 2^-24 in the low bits of the sum.
    float shifted = magnitude + 0.5f;
    std::memcpy(&bits, &shifted, 4);
    return sign | static_cast<uint16_t>(bits - 0x3f000000);
  }
  uint32_t odd = bits >> 13 & 1;
  return sign | static_cast<uint16_t>((bits - (112u << 23) + 0xfff + odd) >> 13);
}

}  // namespace kvsieve
