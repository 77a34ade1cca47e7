// Scoring and choosing blocks for the segments of a step, one layer at a time.
#pragma once

#include <vector>

#include "kvsieve/anchors.h"
#include "kvsieve/buffer.h"
#include "kvsieve/pool.h"
#include "kvsieve/segment.h"
#include "kvsieve/select.h"
#include "kvsieve/vectors.h"

namespace kvsieve {

class Selection {
 public:
  Selection(const Kernels& kernels, int threads)
      : kernels_(kernels),
        anchors_(kernels, threads),
        vectors_(kernels, threads),
        scratch_(threads) {}

  // Sizes buffers and sets every list to exact. Not called by workers.
  void prepare(HeadShape shape, const std::vector<Segment>& segments);
  // Fills the lists; called by every worker of a job.
  void run(Worker& worker, const std::vector<Segment>& segments, const FoldedQueries& queries,
           int layer);
  // Adds what attention will read to the segments' counts; by one thread, after run.
  void count_pairs(std::vector<Segment>& segments);

  // Scores by the selector's rule (or shares of the attention) of selection blocks [0, ceil(n /
  // block_size)): out[row * stride + block].
  void score(const Segment& segment, int layer, int kv_head, const Queries& q, int rows, int n,
             float* out, int stride, int thread);

  // The numbers that selector `random` draws for `count` blocks.
  static void draw(const Plan& plan, int layer, int head, int position, int count, float* out);

  const std::vector<Lists>& lists() const { return lists_; }
  static int score_stride(const Segment& segment);

 private:
  struct Scratch {
    Buffer<float> page_logits, scores, merged, masses, exact;
    Buffer<float> all_logits;  // for true masses, of kMaxRows rows
    Buffer<uint8_t> taken;
    Buffer<int32_t> order;
  };
  // Which keys of a block are compared: those on the first of two levels, or all sampled ones.
  enum class Keys { coarse, all };
  // Rows that score the blocks of one KV head.
  struct Scoring {
    const Segment& segment;
    int layer, kv_head;
    Queries q;
    int rows, n;
    float* out;
    int stride;
    VectorQueries vectors;  // with a selector by vectors
  };
  bool decode_is_sparse(const Segment& s) const;
  bool tile_is_sparse(const Segment& s, int tile) const;
  // `ahead` is the group that is asked for meanwhile, or -1.
  void score_group(const Scoring& scoring, int group, int ahead, Keys keys, Scratch& scratch) const;
  void score_from_pages(const Scoring& scoring, int block, Keys keys, Scratch& scratch) const;
  // Calls use(scoring) for the query heads of a decode list, up to 8 at a time.
  template <class Use>
  void each_scoring(size_t segment, const Segment& s, const FoldedQueries& queries, int layer,
                    int head, int thread, const Use& use);
  // Scores the heads of a decode list in `count` groups, at(0), at(1), ...
  template <class At>
  void score_groups(size_t segment, const Segment& s, const FoldedQueries& queries, int layer,
                    int head, int count, const At& at, Keys keys, int thread);
  // With the rows' codes for an index of vectors, which stay until the thread's next Scoring.
  Scoring scoring(const Segment& s, int layer, int kv_head, const Queries& q, int rows, int n,
                  float* out, int stride, int thread);
  void score_decode(Worker& worker, size_t segment, const Segment& s, const FoldedQueries& queries,
                    int layer, int heads);
  void choose_candidates(size_t segment, const Segment& s, int head, int thread);
  void select_decode(size_t segment, const Segment& s, int head, const int64_t* importance,
                     Lists& lists, int thread);
  void pick(const Segment& s, const float* scores, int count, const int64_t* importance,
            PickScratch scratch) const;
  // Shares of the attention of rows of block `own` per selection block, from their masses per block
  // of 32, merged into `shares` (for `first`: written): the largest, or under a mass budget the
  // sum.
  void add_shares(const Segment& s, const float* masses, int stride, int rows, int own, bool first,
                  float* shares) const;
  // Calls use(q, rows, h) for query heads first + h to first + h + rows - 1 of a decoded token.
  template <class Use>
  void each_rows(const Segment& s, const FoldedQueries& queries, int first, int heads,
                 const Use& use) const;
  // The lists of a decoded token by shares, in three phases, so that few lists use many threads:
  // estimate and name candidates; logits of the candidates' keys; correct and choose.
  void select_by_shares(Worker& worker, const Segment& s, const FoldedQueries& queries, int layer,
                        Lists& lists);
  void name_candidates(const Segment& s, const FoldedQueries& queries, int layer, int list,
                       Lists& lists, int thread);
  void candidate_logits(const Segment& s, const FoldedQueries& queries, int layer, int list,
                        int chunk);
  // Puts the candidates' exact masses in place of the estimates, and corrects those of the others.
  void correct_masses(const Segment& s, int list, Lists& lists, int thread);
  void choose_by_shares(const Segment& s, int list, Lists& lists, int thread);
  void score_shares(const Segment& s, int layer, int kv_head, const Queries& q, int rows,
                    float* out, int stride, int thread);
  // Masses of blocks 0 to `own` as Anchors::estimate gives them; true ones with selector `oracle`,
  // and of an only block.
  void block_masses(const Segment& s, int layer, int kv_head, const Queries& q, int rows, int own,
                    const int* visible, float* masses, int stride, float* top, int thread);
  void true_masses(const Segment& s, int layer, int kv_head, const Queries& q, int rows, int own,
                   const int* visible, float* masses, int stride, float* top, int thread);
  void select_decode_at_random(const Segment& s, int layer, int head, Lists& lists, int thread);
  // Merged shares of all rows of a prompt tile.
  void tile_shares(const Segment& s, const FoldedQueries& queries, int layer, int kv_head, int tile,
                   float* shares, int thread);
  void select_tile(const Segment& s, const FoldedQueries& queries, int layer, int kv_head, int tile,
                   Lists& lists, int thread);
  void store_list(const Segment& s, const uint8_t* taken, int num_blocks, int head, int tile,
                  Lists& lists);

  const Kernels& kernels_;
  Anchors anchors_;
  Vectors vectors_;
  HeadShape shape_{};
  std::vector<Scratch> scratch_;
  std::vector<Lists> lists_;
  // Of the decode segment whose lists are being chosen by shares.
  struct ByShares {
    int stride = 0, refined = 0;   // room per row of masses; pages refined at most
    Buffer<float> masses, shares;  // [query head][stride]; [list][stride]
    Buffer<float> logits;          // [query head][refined][32]
    Buffer<uint8_t> taken;         // [list][stride]
    Buffer<int32_t> pages;         // [list][refined]
    void reserve(int heads, int room, int most_pages);
    std::vector<int> num_pages;  // [list]
  } by_shares_;
  Buffer<float> scores_;                           // decode: [segment][query head][stride]
  std::vector<size_t> scores_at_, candidates_at_;  // where a segment's begin
  Buffer<int32_t> candidates_;                     // decode: [segment][list][num_candidates(k)]
  Buffer<int64_t> importance_;  // sums over the selection blocks of each decode segment
  std::vector<size_t> importance_at_;
  std::vector<uint8_t> read_;  // count_pairs: blocks read by any head of a group
};

}  // namespace kvsieve
