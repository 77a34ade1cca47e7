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

}  // namespace

template <class T>
T* Weight::allocate(size_t count) {
  bytes_ += count * sizeof(T);
  return static_cast<T*>(arena_->allocate(count * sizeof(T)));
}

std::unique_ptr<Weight> Weight::pack(const void* data, SourceFormat format, int rows, int cols,
                                     WeightKind kind, std::shared_ptr<Arena> arena) {
  auto weight = std::make_unique<Weight>();
  weight->arena_ = std::move(arena);
  WeightView& v = weight->view_;
  v = {kind, rows, cols, 0, nullptr, nullptr, nullptr, nullptr};
  const int panels = weight->panels(), groups = cols / kGroup;
  const size_t padded = static_cast<size_t>(panels) * kPanel * cols;
  if (kind == WeightKind::f32) {
    float* out = weight->allocate<float>(padded);
    const float* in = static_cast<const float*>(data);
    for (int r = 0; r < rows; r++)
      for (int c = 0; c < cols; c++)
        out[(static_cast<size_t>(r / kPanel) * cols + c) * kPanel + r % kPanel] =
            in[static_cast<size_t>(r) * cols + c];
    v.values = out;
    return weight;
  }
  // Rows that fill up the last panel stay zero, as the arena gave them.
  const size_t scales = static_cast<size_t>(panels) * groups * kPanel;
  weight->codes_ = weight->allocate<uint8_t>(kind == WeightKind::q4 ? padded / 2 : padded);
  weight->d_ = weight->allocate<uint16_t>(scales);
  if (format == SourceFormat::q4_1) weight->m_ = weight->allocate<uint16_t>(scales);
  v.offset = kind == WeightKind::q8 ? 128 : format == SourceFormat::q4_0 ? 8 : 0;
  v.codes = weight->codes_;
  v.d = weight->d_;
  v.m = weight->m_;
  const uint8_t* block = static_cast<const uint8_t*>(data);
  for (int r = 0; r < rows; r++)
    for (int g = 0; g < groups; g++, block += block_bytes(format))
      if (!weight->pack_group(block, format, r, g)) return nullptr;
  return weight;
}

bool Weight::pack_group(const uint8_t* block, SourceFormat format, int row, int group) {
  const int groups = view_.cols / kGroup, lane = row % kPanel;
  const size_t at = static_cast<size_t>(row / kPanel) * groups + group;
  if (view_.kind == WeightKind::q4) {
    // A GGUF block keeps values j and j + 16 in the nibbles of byte j: the panel's order, so whole
    // words move.
    const bool has_m = format == SourceFormat::q4_1;
    std::memcpy(&d_[at * kPanel + lane], block, 2);
    if (has_m) std::memcpy(&m_[at * kPanel + lane], block + 2, 2);
    const uint8_t* codes = block + (has_m ? 4 : 2);
    for (int i = 0; i < 4; i++)
      std::memcpy(codes_ + at * 256 + i * 64 + lane * 4, codes + i * 4, 4);
    return true;
  }
  int8_t codes[kGroup];
  uint16_t d;
  bool fits = true;
  if (format == SourceFormat::q8_0) {
    std::memcpy(&d, block, 2);
    std::memcpy(codes, block + 2, kGroup);
  } else {
    float values[kGroup];
    std::memcpy(values, block, sizeof values);
    fits = quantize_group(values, codes, &d);
  }
  d_[at * kPanel + lane] = d;
  for (int i = 0; i < kGroup; i++)
    codes_[at * 512 + static_cast<size_t>(i / 4) * 64 + lane * 4 + i % 4] =
        static_cast<uint8_t>(codes[i] + 128);
  return fits;
}

}  // namespace kvsieve
