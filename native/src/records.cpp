#include "kvsieve/records.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kvsieve/half.h"

namespace kvsieve {

void read_key(const Segment& s, const uint8_t* page, int slot, float* key) {
  const PageLayout& layout = s.layout;
  const int d = layout.head_dim;
  const float* scales = reinterpret_cast<const float*>(page + layout.k_scale);
  for (int c = 0; c < d; c++) {
    if (layout.k_type == CacheType::q8) {
      const int code = page[(c / 4 * kBlock + slot) * 4 + c % 4] - 128;
      key[c] = static_cast<float>(code) * scales[slot];
    } else if (layout.k_type == CacheType::q4) {
      const int chunk = c / 4, half = d / 8;
      const uint8_t both = page[(chunk % half * kBlock + slot) * 4 + c % 4];
      const int code = (chunk >= half ? both >> 4 : both & 15) - 8;
      key[c] = static_cast<float>(code) * scales[c / kGroup * kBlock + slot];
    } else if (layout.k_type == CacheType::f16) {
      key[c] = half_to_float(reinterpret_cast<const uint16_t*>(page)[c * kBlock + slot]);
    } else {
      key[c] = reinterpret_cast<const float*>(page)[c * kBlock + slot];
    }
  }
}

namespace {

float largest_magnitude(const float* x, int n) {
  float largest = 0;
  for (int i = 0; i < n; i++) largest = std::max(largest, std::fabs(x[i]));
  return largest;
}

}  // namespace

float quantize_row(const float* x, int n, uint8_t* codes) {
  const float scale = largest_magnitude(x, n) / 127.0f;
  for (int i = 0; i < n; i++) {
    const float code = scale > 0 ? std::nearbyintf(x[i] / scale) : 0.0f;
    codes[i] = static_cast<uint8_t>(std::clamp(code, -127.0f, 127.0f) + 128.0f);
  }
  return scale;
}

float quantize_outward(const float* x, int n, bool up, uint8_t* codes) {
  const float largest = largest_magnitude(x, n);
  float scale = largest / 127.0f;
  // A product of 7 and 24 bits is exact in double.
  if (127.0 * scale < largest) scale = std::nextafter(scale, __builtin_inff());
  for (int i = 0; i < n; i++) {
    const float quotient = scale > 0 ? x[i] / scale : 0.0f;
    int code = static_cast<int>(up ? std::ceil(quotient) : std::floor(quotient));
    const double value = static_cast<double>(code) * scale;
    if (up && value < x[i]) code++;  // the quotient was rounded
    if (!up && value > x[i]) code--;
    codes[i] = static_cast<uint8_t>(code + 128);
  }
  return scale;
}

void store_lane(const uint8_t* codes, int n, int lane, uint8_t* vector) {
  for (int c = 0; c < n / 4; c++)
    std::memcpy(vector + (c * kIndexLanes + lane) * 4, codes + 4 * c, 4);
}

}  // namespace kvsieve
