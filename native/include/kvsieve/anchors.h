// Selector `anchors`: what lies in its index, and the attention mass of blocks that follows from
// it; the twin of kernels/reference/anchors.py.
#pragma once

#include <vector>

#include "kvsieve/buffer.h"
#include "kvsieve/segment.h"

namespace kvsieve {

class Anchors {
 public:
  Anchors(const Kernels& kernels, int threads) : kernels_(kernels), scratch_(threads) {}

  // Sizes buffers for segments with an index of anchors. Not called by workers.
  void prepare(HeadShape shape, const std::vector<Segment>& segments);

  // Blocks whose record becomes final with the rows of a segment: those that the last row of the
  // block behind them is among.
  static int num_completed(const Segment& s);
  // Writes the record of completed block number `item` for every KV head.
  void build(const Segment& s, const FoldedQueries& queries, int layer, int item) const;

  // Attention mass of blocks 0 to `own` for query rows of block `own` (at least 1), each seeing
  // `visible` tokens: masses[row * stride + block] in units of exp(top[row]). Estimated from the
  // index, exact for the last two blocks.
  void estimate(const Segment& s, int layer, int kv_head, const Queries& q, int rows, int own,
                const int* visible, float* masses, int stride, float* top, int thread);

  static int stride(const Segment& s) {
    return (s.num_blocks() + kIndexLanes - 1) / kIndexLanes * kIndexLanes;
  }

 private:
  struct Scratch {
    Buffer<float> logits;  // [vector][row][stride]
  };
  void write_record(const Segment& s, int layer, int kv_head, int block, const int* chosen) const;

  const Kernels& kernels_;
  HeadShape shape_{};
  std::vector<Scratch> scratch_;
};

}  // namespace kvsieve
