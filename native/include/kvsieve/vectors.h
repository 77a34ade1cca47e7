// Selectors `minmax`, `mean` and `meanstd`: one or two vectors that stand for a block; the twin of
// kernels/reference/vectors.py.
#pragma once

#include <vector>

#include "kvsieve/buffer.h"
#include "kvsieve/segment.h"

namespace kvsieve {

class Vectors {
 public:
  Vectors(const Kernels& kernels, int threads) : kernels_(kernels), scratch_(threads) {}

  // Sizes buffers. Not called by workers.
  void prepare(HeadShape shape);

  // Records that become final with the rows of a segment: those of full blocks, for each KV head.
  static int num_completed(const Segment& s);
  void build(const Segment& s, int layer, int item) const;

  // The codes that the vectors meet, of up to kMaxRows query rows; they stay until the thread's
  // next call.
  VectorQueries fold(const Segment& s, const Queries& q, int rows, int thread);
  // Scores of 16 selection blocks of the first n tokens, from number 16 * `group` on:
  // out[row * stride + block]. `ahead` is the group that is asked for meanwhile, or -1.
  void score(const Segment& s, int layer, int kv_head, const Queries& q,
             const VectorQueries& vectors, int rows, int n, int group, int ahead, float* out,
             int stride) const;

 private:
  struct Scratch {
    Buffer<int8_t> codes;
    int32_t offsets[kVectors * kMaxRows];
  };

  const Kernels& kernels_;
  int head_dim_ = 0;
  std::vector<Scratch> scratch_;
};

}  // namespace kvsieve
