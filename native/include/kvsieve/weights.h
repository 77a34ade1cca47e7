// Packing matrices from a file's blocks into panels of 16 output rows.
#pragma once

#include <memory>

#include "kvsieve/arena.h"
#include "kvsieve/kernels.h"

namespace kvsieve {

enum class SourceFormat { f32, q4_0, q4_1, q8_0 };

class Weight {
 public:
  // `data`: f32 [rows, cols], or GGUF blocks row by row; cols is a multiple of 32. f32 sources are
  // packed as f32 or as q8 (per 32 values d = f16(max/127)). Null if a q8 scale exceeds f16.
  // The arena is kept alive.
  static std::unique_ptr<Weight> pack(const void* data, SourceFormat format, int rows, int cols,
                                      WeightKind kind, std::shared_ptr<Arena> arena);

  const WeightView& view() const { return view_; }
  int panels() const { return (view_.rows + kPanel - 1) / kPanel; }
  size_t bytes() const { return bytes_; }

 private:
  template <class T>
  T* allocate(size_t count);
  bool pack_group(const uint8_t* data, SourceFormat format, int row, int group);

  WeightView view_{};
  std::shared_ptr<Arena> arena_;
  // The view's arrays, writable while they are packed.
  uint8_t* codes_ = nullptr;
  uint16_t *d_ = nullptr, *m_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace kvsieve
