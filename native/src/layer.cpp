#include "kvsieve/layer.h"

#include <chrono>
#include <cstring>

namespace kvsieve {

namespace {

int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

// Phases of a layer: 12 of its own, and for each segment at most 1 to enter the cache, 1 to
// complete its index, 5 to select and 1 to sum importance.
int num_phases(size_t segments) { return 12 + 8 * static_cast<int>(segments); }

// So many rows each thread norms and quantises for itself: less than the wait for one that does it
// for all (576 values take .2 us, the end of a phase .3 to 1).
constexpr int kFewRows = 4;

// 4 panels x 18 groups x 320 bytes (576 inputs, 4-bit) = 23 KiB: two stretches fit the first cache
// level while rows pass. A multiple of 2, so that a stretch holds whole groups of 32 outputs.
constexpr int kStretch = 4;

// Panels that a thread takes at once: of 4, 3, 2 and 1 what leaves the busiest of `threads` the
// least. 36 panels in fours would be 20 and 16 for two threads.
int stretch_for(int panels, int threads) {
  int best = kStretch, least = panels + kStretch;
  for (int stretch = kStretch; stretch >= 1; stretch--) {
    const int items = (panels + stretch - 1) / stretch;
    const int busiest = (items + threads - 1) / threads * stretch;
    if (busiest < least) best = stretch, least = busiest;
  }
  return best;
}

}  // namespace

Activations Engine::ActivationBuffer::prepare(int rows, int cols) {
  const size_t count = static_cast<size_t>(rows) * cols, groups = count / kGroup;
  values.reserve(count);
  codes.reserve(count);
  scale.reserve(groups);
  sum.reserve(groups);
  codes_sum.reserve(groups);
  return view(cols);
}

// Panels of several matrices with the same input are shared out as one row of panels.
void Engine::project_all(Worker& worker, const Activations& x, int rows,
                         std::initializer_list<Output> outputs) {
  // Several matrices even each other out.
  const int threads = team_.size();
  const int stretch =
      outputs.size() > 1 ? kStretch : stretch_for(outputs.begin()->weight->panels(), threads);
  int64_t stretches = 0;
  for (const Output& out : outputs) stretches += (out.weight->panels() + stretch - 1) / stretch;
  worker.share(stretches, 1, [&](int64_t i) {
    for (const Output& out : outputs) {
      const int panels = out.weight->panels();
      const int64_t own = (panels + stretch - 1) / stretch;
      if (i < own) {
        const int begin = static_cast<int>(i) * stretch;
        const int end = begin + stretch < panels ? begin + stretch : panels;
        kernels_.project(out.weight->view(), x, rows, begin, end, out.y, out.stride, out.add);
        return;
      }
      i -= own;
    }
  });
}

void Engine::quantize(const Activations& x, int row, int begin_group, int end_group) {
  if (!kernels_.quantize_row(x, row, begin_group, end_group)) non_finite_.store(true);
}

template <class Fill>
Activations Engine::each_row(Worker& worker, const Activations& shared, int rows,
                             const Fill& fill) {
  if (rows > kFewRows) {
    worker.share(rows, 4, [&](int64_t row) { fill(shared, static_cast<int>(row)); });
    return shared;
  }
  // A thread that comes late may read rows that the others already change. Then they are past the
  // phase that uses them: it finds no item left, and what it made here goes unused.
  const Activations own = own_[worker.id()].view(shared.cols);
  for (int row = 0; row < rows; row++) fill(own, row);
  return own;
}

Activations Engine::normed(Worker& worker, const Activations& input, int rows, const float* norm,
                           float eps, const float* hidden) {
  const int width = input.cols;
  return each_row(worker, input, rows, [&](const Activations& x, int row) {
    const size_t at = static_cast<size_t>(row) * width;
    kernels_.rms_norm(hidden + at, norm, eps, width, x.values + at);
    quantize(x, row, 0, width / kGroup);
  });
}

void Engine::project_residual(Worker& worker, const Activations& x, int rows, const Weight& weight,
                              const float* norm, float eps, float* hidden) {
  const int width = weight.view().rows;
  if (!norm) return project_all(worker, x, rows, {{&weight, hidden, width, true}});
  project_all(worker, x, rows, {{&weight, residual_.data(), width, false}});
  worker.share(rows, 4, [&](int64_t row) {
    float *to = hidden + row * width, *part = residual_.data() + row * width;
    kernels_.rms_norm(part, norm, eps, width, part);
    for (int i = 0; i < width; i++) to[i] += part[i];
  });
}

void Engine::norm_and_rotate(const Step& step, const Heads& heads, const Segment& s, int row,
                             const float* norm, float* head) const {
  const LayerShape& shape = heads.layer->shape;
  if (norm) kernels_.rms_norm(head, norm, shape.rms_norm_eps, shape.heads.head_dim, head);
  const size_t at = (static_cast<size_t>(s.first_row) + row) * (shape.rope_dim / 2);
  kernels_.rope(head, step.cos + at, step.sin + at, shape.rope_dim, shape.rope_interleaved);
}

bool Engine::enter_query(const Step& step, const Segment& s, int row, int head,
                         const Heads& heads) {
  const size_t at = static_cast<size_t>(s.first_row) + row;
  float* q = heads.q + (at * heads.shape.num_q_heads + head) * heads.shape.head_dim;
  if (heads.layer) norm_and_rotate(step, heads, s, row, heads.layer->q_norm, q);
  return queries_.fold(kernels_, s, row, head, heads.scale);
}

bool Engine::enter_tile(const Step& step, const Segment& s, int layer, int head, int tile,
                        const Heads& heads) {
  for (int at = s.tile_begin(tile); heads.layer && at < s.tile_end(tile); at++) {
    const int row = at - s.start;
    float* k =
        heads.k + ((static_cast<size_t>(s.first_row) + row) * heads.shape.num_kv_heads + head) *
                      heads.shape.head_dim;
    norm_and_rotate(step, heads, s, row, heads.layer->k_norm, k);
  }
  return append_tile(kernels_, s, layer, head, tile, heads.k, heads.v);
}

void Engine::enter_cache(Worker& worker, const Step& step, int layer, const Heads& heads) {
  const int num_q = heads.q ? heads.shape.num_q_heads : 0;
  const int num_kv = heads.k ? heads.shape.num_kv_heads : 0;
  for (const Segment& s : step.segments) {
    // A tile of a KV head is one item, because two tokens of a q4 page share bytes; a tile of a
    // query head likewise, to be about as large.
    const int tiles = s.num_blocks() - s.first_tile(), all = num_q + num_kv;
    worker.share(static_cast<int64_t>(tiles) * all, 1, [&](int64_t item) {
      const int tile = static_cast<int>(item) / all, head = static_cast<int>(item) % all;
      bool finite = true;
      if (head >= num_q)
        finite = enter_tile(step, s, layer, head - num_q, tile, heads);
      else
        for (int at = s.tile_begin(tile); at < s.tile_end(tile); at++)
          finite = enter_query(step, s, at - s.start, head, heads) && finite;
      if (!finite) non_finite_.store(true);
    });
  }
}

void Engine::project_heads(Worker& worker, const Step& step, int layer, const Heads& heads,
                           const Activations& x, float* v) {
  const int num_q = heads.shape.num_q_heads, num_kv = heads.shape.num_kv_heads;
  const int panels = heads.shape.head_dim / kPanel;
  auto project = [&](const Weight& weight, const float* bias, int head, float* y) {
    kernels_.project(weight.view(), x, step.rows, head * panels, (head + 1) * panels, y,
                     weight.view().rows, bias != nullptr);
  };
  const Layer& its = *heads.layer;
  worker.share(num_kv + num_q, 1, [&](int64_t item) {
    const int head = static_cast<int>(item);
    bool finite = true;
    if (head < num_kv) {  // the larger items first
      project(*its.k, its.k_bias, head, heads.k);
      project(*its.v, its.v_bias, head, v);
      for (const Segment& s : step.segments)
        finite = enter_tile(step, s, layer, head, 0, heads) && finite;
    } else {
      project(*its.q, its.q_bias, head - num_kv, heads.q);
      for (const Segment& s : step.segments)
        finite = enter_query(step, s, 0, head - num_kv, heads) && finite;
    }
    if (!finite) non_finite_.store(true);
  });
}

void Engine::gated_units(Worker& worker, const Layer& layer, const Activations& x, int rows,
                         const Activations& gated) {
  const int inner = layer.shape.intermediate_size, panels = layer.gate->panels();
  const auto gate = layer.shape.gelu ? kernels_.gelu_mul : kernels_.silu_mul;
  constexpr int kWidth = kStretch * kPanel;
  float* gates = gates_[worker.id()].data();
  float* ups = gates + static_cast<size_t>(rows) * kWidth;
  worker.share((panels + kStretch - 1) / kStretch, 1, [&](int64_t stretch) {
    const int begin = static_cast<int>(stretch) * kStretch;
    const int end = begin + kStretch < panels ? begin + kStretch : panels;
    // Only this stretch's columns are kept, one after the other: some 100 KiB for 512 rows.
    kernels_.project(layer.gate->view(), x, rows, begin, end, gates - begin * kPanel, kWidth,
                     false);
    kernels_.project(layer.up->view(), x, rows, begin, end, ups - begin * kPanel, kWidth, false);
    for (int row = 0; row < rows; row++) {
      const size_t from = static_cast<size_t>(row) * kWidth;
      gate(gates + from, ups + from, (end - begin) * kPanel,
           gated.values + static_cast<size_t>(row) * inner + begin * kPanel);
      quantize(gated, row, begin * kPanel / kGroup, end * kPanel / kGroup);
    }
  });
}

void Engine::finish_rows(Worker& worker, const Layer& layer, const Activations& attended,
                         const Activations& input, const Activations& gated, int rows,
                         float* hidden) {
  const int q_width = attended.cols;
  const float eps = layer.shape.rms_norm_eps;
  const Activations heads_out =
      each_row(worker, attended, rows, [&](const Activations& x, int row) {
        const size_t at = static_cast<size_t>(row) * q_width;
        if (x.values != attended.values)
          std::memcpy(x.values + at, attended.values + at, sizeof(float) * q_width);
        quantize(x, row, 0, q_width / kGroup);
      });
  project_residual(worker, heads_out, rows, *layer.o, layer.attn_post_norm, eps, hidden);
  const Activations x = normed(worker, input, rows, layer.ffn_norm, eps, hidden);
  gated_units(worker, layer, x, rows, gated);
  project_residual(worker, gated, rows, *layer.down, layer.ffn_post_norm, eps, hidden);
}

bool Engine::run_layer(const Layer& layer, int index, float* hidden, Step& step,
                       const int32_t* kept, int num_kept) {
  const LayerShape& shape = layer.shape;
  const HeadShape& heads = shape.heads;
  const int rows = step.rows, width = shape.hidden_size, inner = shape.intermediate_size;
  const int q_width = heads.num_q_heads * heads.head_dim;
  const int kv_width = heads.num_kv_heads * heads.head_dim;
  const Activations input = input_.prepare(rows, width);
  const Activations attended = attended_.prepare(rows, q_width);
  const Activations gated = gated_.prepare(rows, inner);
  q_.reserve(static_cast<size_t>(rows) * q_width);
  k_.reserve(static_cast<size_t>(rows) * kv_width);
  v_.reserve(static_cast<size_t>(rows) * kv_width);
  for (Buffer<float>& gates : gates_) gates.reserve(size_t{2} * rows * kStretch * kPanel);
  if (layer.attn_post_norm || layer.ffn_post_norm)
    residual_.reserve(static_cast<size_t>(rows) * width);
  if (kept) {
    kept_.reserve(static_cast<size_t>(num_kept) * width);
    kept_heads_.reserve(static_cast<size_t>(num_kept) * q_width);
  }
  for (ActivationBuffer& own : own_) own.prepare(kFewRows, width > q_width ? width : q_width);
  for (Segment& s : step.segments) s.plan.enter(index);
  queries_.prepare(heads, rows, q_.data());
  selection_.prepare(heads, step.segments);
  attention_.prepare(heads, step.segments);
  non_finite_.store(false);
  const std::vector<Segment>& segments = step.segments;

  // Where there is a bias, the projection is added to it.
  auto place_bias = [&](const float* bias, int length, float* rows_of) {
    if (!bias) return false;
    for (int row = 0; row < rows; row++)
      std::memcpy(rows_of + static_cast<size_t>(row) * length, bias, sizeof(float) * length);
    return true;
  };
  const bool q_add = place_bias(layer.q_bias, q_width, q_.data());
  const bool k_add = place_bias(layer.k_bias, kv_width, k_.data());
  const bool v_add = place_bias(layer.v_bias, kv_width, v_.data());
  const bool one_row_each = rows == static_cast<int>(segments.size());
  const Heads entering{heads, q_.data(), k_.data(), v_.data(), shape.attention_scale, &layer};
  const int64_t start = now_ns();
  int64_t before_select = 0, after_select = 0, after_attention = 0;
  team_.run(num_phases(step.segments.size()), [&](Worker& worker) {
    const Activations before_attention =
        normed(worker, input, rows, layer.attn_norm, shape.rms_norm_eps, hidden);
    if (one_row_each) {
      project_heads(worker, step, index, entering, before_attention, v_.data());
    } else {
      project_all(worker, before_attention, rows,
                  {{layer.q, q_.data(), q_width, q_add},
                   {layer.k, k_.data(), kv_width, k_add},
                   {layer.v, v_.data(), kv_width, v_add}});
      enter_cache(worker, step, index, entering);
    }

    if (worker.is_caller()) before_select = now_ns();
    selection_.run(worker, segments, queries_, index);
    if (worker.is_caller()) after_select = now_ns();
    attention_.run(worker, segments, selection_.lists(), queries_, index, attended.values);
    if (worker.is_caller()) after_attention = now_ns();

    if (!kept) {
      finish_rows(worker, layer, attended, input, gated, rows, hidden);
    } else if (num_kept) {
      Activations heads_kept = attended;
      heads_kept.values = kept_heads_.data();
      worker.share(num_kept, 4, [&](int64_t i) {
        std::memcpy(heads_kept.values + i * q_width,
                    attended.values + static_cast<size_t>(kept[i]) * q_width,
                    sizeof(float) * q_width);
        std::memcpy(kept_.data() + i * width, hidden + static_cast<size_t>(kept[i]) * width,
                    sizeof(float) * width);
      });
      finish_rows(worker, layer, heads_kept, input, gated, num_kept, kept_.data());
    }
  });
  for (int i = 0; kept && i < num_kept; i++)
    std::memcpy(hidden + static_cast<size_t>(kept[i]) * width,
                kept_.data() + static_cast<size_t>(i) * width, sizeof(float) * width);
  selection_.count_pairs(step.segments);
  attention_.count_kept(step.segments);
  step.times.select_ns += after_select - before_select;
  step.times.attention_ns += after_attention - after_select;
  step.times.dense_ns += now_ns() - start - (after_attention - before_select);
  return !non_finite_.load();
}

bool Engine::project(const float* x, int rows, const Weight& weight, float* y) {
  non_finite_.store(false);
  const Activations input = input_.prepare(rows, weight.view().cols);
  std::memcpy(input.values, x, sizeof(float) * rows * input.cols);
  team_.run(2, [&](Worker& worker) {
    worker.share(rows, 4, [&](int64_t row) {
      quantize(input, static_cast<int>(row), 0, input.cols / kGroup);
    });
    project_all(worker, input, rows, {{&weight, y, weight.view().rows, false}});
  });
  return !non_finite_.load();
}

bool Engine::append(Step& step, int layer, float* k, const float* v) {
  non_finite_.store(false);
  const Segment& s = step.segments[0];
  const HeadShape shape{0, s.num_kv_heads, s.layout.head_dim};
  team_.run(num_phases(step.segments.size()), [&](Worker& worker) {
    enter_cache(worker, step, layer, {shape, nullptr, k, v, 0.0f, nullptr});
  });
  return !non_finite_.load();
}

bool Engine::fold(Step& step, HeadShape shape, float* q, float scale) {
  queries_.prepare(shape, step.rows, q);
  selection_.prepare(shape, step.segments);
  attention_.prepare(shape, step.segments);
  non_finite_.store(false);
  team_.run(num_phases(step.segments.size()), [&](Worker& worker) {
    enter_cache(worker, step, 0, {shape, q, nullptr, nullptr, scale, nullptr});
  });
  return !non_finite_.load();
}

bool Engine::score(Step& step, HeadShape shape, int layer, float* q, float scale, float* out,
                   int stride) {
  for (Segment& s : step.segments) s.plan.enter(layer);
  if (!fold(step, shape, q, scale)) return false;
  const Segment& s = step.segments[0];
  team_.run(num_phases(step.segments.size()), [&](Worker& worker) {
    worker.share(shape.num_q_heads, 1, [&](int64_t head) {
      const int h = static_cast<int>(head);
      if (s.plan.selector == Selector::random)
        return Selection::draw(s.plan, layer, h, s.end() - 1, (s.end() - 1) / s.plan.block_size + 1,
                               out + head * stride);
      selection_.score(s, layer, h / shape.group_size(), queries_.view(s, 0, h, true), 1, s.end(),
                       out + head * stride, stride, worker.id());
    });
  });
  return true;
}

bool Engine::select(Step& step, HeadShape shape, int layer, float* q, float scale) {
  for (Segment& s : step.segments) s.plan.enter(layer);
  if (!fold(step, shape, q, scale)) return false;
  team_.run(num_phases(step.segments.size()),
            [&](Worker& worker) { selection_.run(worker, step.segments, queries_, layer); });
  return true;
}

bool Engine::attend(Step& step, HeadShape shape, int layer, float* q, float scale,
                    const std::vector<Lists>& lists, float* out) {
  if (!fold(step, shape, q, scale)) return false;
  team_.run(num_phases(step.segments.size()), [&](Worker& worker) {
    attention_.run(worker, step.segments, lists, queries_, layer, out);
  });
  return true;
}

}  // namespace kvsieve
