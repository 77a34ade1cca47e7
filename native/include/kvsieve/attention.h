// Attention of one layer over the pages of several sequences, exact or under the chosen lists.
#pragma once

#include <vector>

#include "kvsieve/buffer.h"
#include "kvsieve/pool.h"
#include "kvsieve/segment.h"

namespace kvsieve {

class Attention {
 public:
  Attention(const Kernels& kernels, int threads) : kernels_(kernels), scratch_(threads) {}

  // Sizes buffers and forgets the layer before. Not called by workers.
  void prepare(HeadShape shape, const std::vector<Segment>& segments);
  // Writes out [rows][Hq * D]; called by every worker of a job.
  void run(Worker& worker, const std::vector<Segment>& segments, const std::vector<Lists>& lists,
           const FoldedQueries& queries, int layer, float* out);
  // Adds the share of attention that the last run read to the segments' counts; by one thread.
  void count_kept(std::vector<Segment>& segments) const;

 private:
  // A unit of work: one run of a decode list for the rows that share it, or one prompt tile of one
  // query head.
  struct Item {
    int segment, head, tile, run, rows;
    size_t partial;
  };
  // Where decode's runs left (o, m, s) of one query head, to be merged in order.
  struct Merge {
    int segment, head, runs;
    size_t partial, step;
  };
  struct Scratch {
    Buffer<float> logits, o;
    Buffer<uint8_t> codes;
    Buffer<float> run_max;            // [run][row of the tile]
    Buffer<int32_t> importance_run;   // one run's tokens
    std::vector<int64_t> importance;  // every recording segment's tokens, one after the other
    bool took_part = false;           // in the layer at hand
    // The same on every thread: each makes them for itself, which is cheaper than waiting for one.
    std::vector<Item> items;
    std::vector<Merge> merges;
  };
  struct List {
    const int32_t* blocks;
    int length;
  };

  void plan(const std::vector<Segment>& segments, const std::vector<Lists>& lists,
            Scratch& scratch) const;
  List list(const Segment& s, const Lists& lists, int head, int tile) const;
  // The pages of one run of a list.
  struct Run {
    const uint8_t* pages[kRunBlocks];
    const int32_t* blocks;
    int count;
  };
  int items_at_once(const std::vector<Segment>& segments, int64_t count) const;
  static Run run_of(const Segment& s, int layer, int kv_head, List blocks, int run);
  // `next` is set for the item that the same thread computes next, null if unknown.
  void attend_decode(const std::vector<Segment>& segments, const std::vector<Lists>& lists,
                     const FoldedQueries& queries, int layer, const Item& item, const Item* next,
                     Scratch& scratch);
  void attend_tile(const Segment& s, const Lists& lists, const FoldedQueries& queries, int layer,
                   const Item& item, float* out, Scratch& scratch);
  void record_importance(List blocks, int rows, const float* m, const float* sums,
                         int64_t* importance, Scratch& scratch) const;
  // Returns the share of all attention that was read, by the estimate of the rest in `lists`.
  float merge(const Merge& merge, const Lists& lists, float* out) const;

  const Kernels& kernels_;
  HeadShape shape_{};
  std::vector<Scratch> scratch_;
  size_t recorded_tokens_ = 0;
  std::vector<size_t> importance_at_;  // where a segment's tokens start in Scratch::importance
  std::vector<int32_t> every_block_;   // 0, 1, 2, ...
  Buffer<float> partials_;             // decode: [item][row][D + 2]
  Buffer<float> kept_;                 // decode: [segment][query head]
};

}  // namespace kvsieve
