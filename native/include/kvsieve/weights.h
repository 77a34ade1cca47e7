// Packing matrices from a file's blocks into panels of 16 output rows.
#pragma once

#include <memory>

#include "kvsieve/arena.h"
#include "kvsieve/kernels.h"

namespace kvsieve {

enum class SourceFormat { f32, q4_0, q4_1, q8_0 };

class Weight {
 public:
  // Room for [rows, cols] that `fill` will bring in `format`; cols is a multiple of 32. f32 sources
  // are packed as f32, as q8 (per 32 values d = f16(max/127)) or as q4 (d = f16(m / -8), m the
  // value of largest magnitude). The arena is kept alive.
  Weight(SourceFormat format, int rows, int cols, WeightKind kind, std::shared_ptr<Arena> arena);
  // Rows [first, first + count): `data` is f32 [count, cols], or GGUF blocks row by row. False if a
  // scale exceeds f16. Threads may fill different panels at once.
  bool fill(const void* data, int first, int count);

  const WeightView& view() const { return view_; }
  int panels() const { return (view_.rows + kPanel - 1) / kPanel; }
  size_t bytes() const { return bytes_; }

 private:
  template <class T>
  T* allocate(size_t count);
  bool pack_group(const uint8_t* data, int row, int group);

  SourceFormat format_;
  WeightView view_{};
  std::shared_ptr<Arena> arena_;
  // The view's arrays, writable while they are packed.
  float* values_ = nullptr;
  uint8_t* codes_ = nullptr;
  uint16_t *d_ = nullptr, *m_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace kvsieve
