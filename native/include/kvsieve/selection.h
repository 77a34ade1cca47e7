// Scoring and choosing blocks for the segments of a step, one layer at a time.
#pragma once

#include <vector>

#include "kvsieve/buffer.h"
#include "kvsieve/pool.h"
#include "kvsieve/segment.h"

namespace kvsieve {

class Selection {
 public:
  Selection(const Kernels& kernels, int threads) : kernels_(kernels), scratch_(threads) {}

  // Sizes buffers and sets every list to exact. Not called by workers.
  void prepare(HeadShape shape, const std::vector<Segment>& segments);
  // Fills the lists; called by every worker of a job.
  void run(Worker& worker, const std::vector<Segment>& segments, const FoldedQueries& queries,
           int layer);
  // Adds what attention will read to the segments' counts; by one thread, after run.
  void count_pairs(std::vector<Segment>& segments);

  // Best sampled logit of selection blocks [0, ceil(n / block_size)): out[row * stride + block].
  void score(const Segment& segment, int layer, int kv_head, const Queries& q, int rows, int n,
             float* out, int stride, int thread);

  const std::vector<Lists>& lists() const { return lists_; }
  static int score_stride(const Segment& segment);

 private:
  struct Scratch {
    Buffer<float> page_logits, scores, merged;
    Buffer<uint8_t> taken;
    Buffer<int32_t> order;
  };
  bool decode_is_sparse(const Segment& s) const;
  bool tile_is_sparse(const Segment& s, int tile) const;
  void score_from_pages(const Segment& s, int layer, int kv_head, const Queries& q, int rows,
                        int block, int n, float* out, int stride, Scratch& scratch);
  void select_decode(const Segment& s, const FoldedQueries& queries, int layer, int head,
                     const int64_t* importance, Lists& lists, int thread);
  void select_tile(const Segment& s, const FoldedQueries& queries, int layer, int kv_head, int tile,
                   Lists& lists, int thread);
  void store_list(const Segment& s, const uint8_t* taken, int num_blocks, int head, int tile,
                  Lists& lists);

  const Kernels& kernels_;
  HeadShape shape_{};
  std::vector<Scratch> scratch_;
  std::vector<Lists> lists_;
  Buffer<int64_t> importance_;  // sums over the selection blocks of each decode segment
  std::vector<size_t> importance_at_;
  std::vector<uint8_t> read_;  // count_pairs: blocks read by any head of a group
};

}  // namespace kvsieve
