// Packing matrices from a file's blocks into panels of 16 output rows.
#pragma once

#include <memory>

#include "kvsieve/buffer.h"
#include "kvsieve/kernels.h"

namespace kvsieve {

enum class SourceFormat { f32, q4_0, q4_1, q8_0 };

class Weight {
 public:
  // `data`: f32 [rows, cols], or GGUF blocks row by row; cols is a multiple of 32. f32 sources are
  // packed as f32 or as q8 (per 32 values d = f16(max/127)). Null if a q8 scale exceeds f16.
  static std::unique_ptr<Weight> pack(const void* data, SourceFormat format, int rows, int cols,
                                      WeightKind kind);

  const WeightView& view() const { return view_; }
  int panels() const { return (view_.rows + kPanel - 1) / kPanel; }
  size_t bytes() const {
    return codes_.size() + 2 * (d_.size() + m_.size()) + sizeof(float) * values_.size();
  }

 private:
  bool pack_group(const uint8_t* data, SourceFormat format, int row, int group);
  WeightView view_{};
  Buffer<uint8_t> codes_;
  Buffer<uint16_t> d_, m_;
  Buffer<float> values_;
};

}  // namespace kvsieve
