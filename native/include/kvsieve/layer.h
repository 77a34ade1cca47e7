// One decoder layer: norm, qkv, rope, append, select, attend, output projection, gated MLP.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "kvsieve/attention.h"
#include "kvsieve/selection.h"
#include "kvsieve/weights.h"

namespace kvsieve {

// A layer's shape is data: another architecture is other values, not other code.
struct LayerShape {
  int hidden_size, intermediate_size;
  HeadShape heads;
  float rms_norm_eps;
  bool rope_interleaved;
  int rope_dim;
  float attention_scale;
  bool gelu;  // the gate's activation; false: silu
};

struct Layer {
  LayerShape shape;
  const float *attn_norm, *ffn_norm;
  const float *q_norm, *k_norm;                 // [head_dim], before rope; null: none
  const float *q_bias, *k_bias, *v_bias;        // [heads * head_dim]; null: none
  const float *attn_post_norm, *ffn_post_norm;  // of what is added to the hidden state; null: none
  const Weight *q, *k, *v, *o, *gate, *up, *down;
};

struct StepTimes {
  int64_t dense_ns = 0, attention_ns = 0, select_ns = 0;
};

// The rows of all sequences in one step, one after the other.
struct Step {
  std::vector<Segment> segments;
  int rows = 0;
  const float *cos, *sin;  // [rows][rope_dim / 2]
  StepTimes times;
};

// Threads, kernels and buffers; runs one job at a time.
class Engine {
 public:
  Engine(const Kernels& kernels, int threads)
      : kernels_(kernels),
        team_(threads),
        selection_(kernels, threads),
        attention_(kernels, threads),
        own_(threads),
        gates_(threads) {}

  // hidden [rows][hidden_size] is updated in place. False if NaN or infinity appeared on the way.
  // With `kept` (ascending), only these rows are: no more is computed than they need, and the
  // cache.
  bool run_layer(const Layer& layer, int index, float* hidden, Step& step,
                 const int32_t* kept = nullptr, int num_kept = 0);

  // Parts of a layer on their own, for tests and for callers with their own queries.
  // x [rows][cols] is read as activations; y [rows][weight rows].
  bool project(const float* x, int rows, const Weight& weight, float* y);
  // k is not changed here, only where a layer rotates it.
  bool append(Step& step, int layer, float* k, const float* v);
  bool score(Step& step, HeadShape shape, int layer, float* q, float scale, float* out, int stride);
  // Lists are read from selection() afterwards.
  bool select(Step& step, HeadShape shape, int layer, float* q, float scale);
  bool attend(Step& step, HeadShape shape, int layer, float* q, float scale,
              const std::vector<Lists>& lists, float* out);

  // What the last run_layer attended with, until anything else runs: queries with the softmax scale
  // folded in, and outputs, each [rows][Hq * D]. The lists are in selection().
  const float* queries() const { return q_.data(); }
  const float* attended() const { return attended_.values.data(); }

  const Selection& selection() const { return selection_; }
  const Kernels& kernels() const { return kernels_; }
  int threads() const { return team_.size(); }

 private:
  // A matrix of activations with its quantised twin, sized for a step.
  struct ActivationBuffer {
    Buffer<float> values, scale, sum;
    Buffer<int8_t> codes;
    Buffer<int32_t> codes_sum;
    Activations prepare(int rows, int cols);
    Activations view(int cols) const {
      return {values.data(), codes.data(), scale.data(), sum.data(), codes_sum.data(), cols};
    }
  };
  struct Output {
    const Weight* weight;
    float* y;
    int stride;
    bool add;
  };
  void project_all(Worker& worker, const Activations& x, int rows,
                   std::initializer_list<Output> outputs);
  // Norms and rotates (where a layer says so), stores and folds every (row, head) and (tile, KV
  // head): one phase.
  struct Heads {
    HeadShape shape;
    float *q, *k;  // either may be null
    const float* v;
    float scale;
    const Layer* layer;  // null: q and k are as they should be
  };
  void enter_cache(Worker& worker, const Step& step, int layer, const Heads& heads);
  // One query head's row, or one KV head's tile of a segment, on its way into the cache.
  bool enter_query(const Step& step, const Segment& s, int row, int head, const Heads& heads);
  bool enter_tile(const Step& step, const Segment& s, int layer, int head, int tile,
                  const Heads& heads);
  // The three projections and enter_cache in one phase, where every segment has one row.
  void project_heads(Worker& worker, const Step& step, int layer, const Heads& heads,
                     const Activations& x, float* v);
  // hidden's rows under an RMS norm, quantised, in `input` or of this thread's own.
  Activations normed(Worker& worker, const Activations& input, int rows, const float* norm,
                     float eps, const float* hidden);
  // Output projection and MLP of `rows` rows.
  void finish_rows(Worker& worker, const Layer& layer, const Activations& attended,
                   const Activations& input, const Activations& gated, int rows, float* hidden);
  // silu(x . gate^T) * (x . up^T), quantised.
  void gated_units(Worker& worker, const Layer& layer, const Activations& x, int rows,
                   const Activations& gated);
  // Calls fill(x, row) for each row: on one thread each for `shared`, or, where there are few, on
  // every thread for itself. Returns what this thread reads from.
  template <class Fill>
  Activations each_row(Worker& worker, const Activations& shared, int rows, const Fill& fill);
  void norm_and_rotate(const Step& step, const Heads& heads, const Segment& s, int row,
                       const float* norm, float* head) const;
  void quantize(const Activations& x, int row, int begin_group, int end_group);
  // hidden += x . W^T, normalised first where `norm` is not null.
  void project_residual(Worker& worker, const Activations& x, int rows, const Weight& weight,
                        const float* norm, float eps, float* hidden);
  bool fold(Step& step, HeadShape shape, float* q, float scale);

  const Kernels& kernels_;
  Team team_;
  Selection selection_;
  Attention attention_;
  FoldedQueries queries_;
  ActivationBuffer input_, attended_, gated_;
  std::vector<ActivationBuffer> own_;  // per thread: a few rows
  std::vector<Buffer<float>> gates_;   // per thread: gates and ups of one stretch of panels
  Buffer<float> q_, k_, v_, residual_, kept_, kept_heads_;
  std::atomic<bool> non_finite_{false};
};

}  // namespace kvsieve
