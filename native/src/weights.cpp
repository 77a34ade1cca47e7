#include "kvsieve/weights.h"

#include <cmath>
#include <cstring>

#include "kvsieve/half.h"

namespace kvsieve {

namespace {

// Bytes of one GGUF block of 32 values: f16 d [, f16 m], then codes.
constexpr size_t block_bytes(SourceFormat format) {
  switch (format) {
    case SourceFormat::q4_0: return 2 + 16;
    case SourceFormat::q4_1: return 2 + 2 + 16;
    case SourceFormat::q8_0: return 2 + 32;
    case SourceFormat::f32: return 32 * sizeof(float);
  }
  return 0;
}

// Signed codes of 32 values and their f16 scale; false if the scale does not fit f16.
bool quantize_group(const float* x, int8_t* codes, uint16_t* d) {
  float largest = 0;
  for (int i = 0; i < kGroup; i++) largest = std::fmax(largest, std::fabs(x[i]));
  *d = float_to_half(largest / 127.0f);
  const float scale = half_to_float(*d);
  for (int i = 0; i < kGroup; i++) {
    float code = scale > 0 ? std::nearbyintf(x[i] / scale) : 0.0f;
    codes[i] = static_cast<int8_t>(code > 127 ? 127 : code < -127 ? -127 : code);
  }
  return std::isfinite(scale);
}

// A q4_0 block of 32 values; false if the scale does not fit f16.
bool quantize_block(const float* x, uint8_t* block) {
  float extreme = 0;
  for (int i = 0; i < kGroup; i++)
    if (std::fabs(x[i]) > std::fabs(extreme)) extreme = x[i];
  const uint16_t d = float_to_half(extreme / -8.0f);
  const float scale = half_to_float(d);
  std::memcpy(block, &d, 2);
  std::memset(block + 2, 0, kGroup / 2);
  for (int i = 0; i < kGroup; i++) {
    float code = scale != 0 ? std::nearbyintf(x[i] / scale) : 0.0f;
    code = code > 7 ? 7 : code < -8 ? -8 : code;
    block[2 + i % 16] |= static_cast<uint8_t>(static_cast<int>(code) + 8) << (i / 16 * 4);
  }
  return std::isfinite(scale);
}

}  // namespace

template <class T>
T* Weight::allocate(size_t count) {
  bytes_ += count * sizeof(T);
  return static_cast<T*>(arena_->allocate(count * sizeof(T)));
}

Weight::Weight(SourceFormat format, int rows, int cols, WeightKind kind,
               std::shared_ptr<Arena> arena)
    : format_(format), view_{kind, rows, cols, 0, nullptr, nullptr, nullptr, nullptr} {
  arena_ = std::move(arena);
  const size_t padded = static_cast<size_t>(panels()) * kPanel * cols;
  // Rows that fill up the last panel stay zero, as the arena gives them.
  if (kind == WeightKind::f32) {
    view_.values = values_ = allocate<float>(padded);
    return;
  }
  const size_t scales = padded / kGroup;
  view_.codes = codes_ = allocate<uint8_t>(kind == WeightKind::q4 ? padded / 2 : padded);
  view_.d = d_ = allocate<uint16_t>(scales);
  if (format == SourceFormat::q4_1) view_.m = m_ = allocate<uint16_t>(scales);
  view_.offset = kind == WeightKind::q8 ? 128 : m_ ? 0 : 8;
}

bool Weight::fill(const void* data, int first, int count) {
  const int cols = view_.cols, groups = cols / kGroup;
  if (values_) {
    const float* in = static_cast<const float*>(data);
    for (int r = first; r < first + count; r++)
      for (int c = 0; c < cols; c++)
        values_[(static_cast<size_t>(r / kPanel) * cols + c) * kPanel + r % kPanel] = *in++;
    return true;
  }
  bool fits = true;
  const uint8_t* block = static_cast<const uint8_t*>(data);
  for (int r = first; r < first + count; r++)
    for (int g = 0; g < groups; g++, block += block_bytes(format_))
      fits = pack_group(block, r, g) && fits;
  return fits;
}

bool Weight::pack_group(const uint8_t* block, int row, int group) {
  const int groups = view_.cols / kGroup, lane = row % kPanel;
  const size_t at = static_cast<size_t>(row / kPanel) * groups + group;
  const bool from_floats = format_ == SourceFormat::f32;
  float values[kGroup];
  if (from_floats) std::memcpy(values, block, sizeof values);
  uint8_t four_bit[2 + kGroup / 2];
  bool fits = true;
  if (view_.kind == WeightKind::q4) {
    if (from_floats) {
      fits = quantize_block(values, four_bit);
      block = four_bit;
    }
    // A GGUF block keeps values j and j + 16 in the nibbles of byte j: the panel's order, so whole
    // words move.
    const bool has_m = m_ != nullptr;
    std::memcpy(&d_[at * kPanel + lane], block, 2);
    if (has_m) std::memcpy(&m_[at * kPanel + lane], block + 2, 2);
    const uint8_t* codes = block + (has_m ? 4 : 2);
    for (int i = 0; i < 4; i++)
      std::memcpy(codes_ + at * 256 + i * 64 + lane * 4, codes + i * 4, 4);
    return fits;
  }
  int8_t codes[kGroup];
  uint16_t d;
  if (format_ == SourceFormat::q8_0) {
    std::memcpy(&d, block, 2);
    std::memcpy(codes, block + 2, kGroup);
  } else {
    fits = quantize_group(values, codes, &d);
  }
  d_[at * kPanel + lane] = d;
  for (int i = 0; i < kGroup; i++)
    codes_[at * 512 + static_cast<size_t>(i / 4) * 64 + lane * 4 + i % 4] =
        static_cast<uint8_t>(codes[i] + 128);
  return fits;
}

}  // namespace kvsieve
