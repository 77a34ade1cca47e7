// Python bindings: decodes arguments and releases the GIL, nothing else. kernels/native.py checks
// shapes, types and ranges before it calls; nothing here is meant to be called by users.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "kvsieve/layer.h"
#include "names.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

template <class T>
using Array = nb::ndarray<T, nb::c_contig, nb::device::cpu>;
using AnyArray = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;

const kvsieve::Kernels& find_kernels(const std::string& isa) {
  int count;
  const kvsieve::IsaInfo* list = kvsieve::isa_list(&count);
  for (int i = 0; i < count; i++)
    if (list[i].supported && isa == list[i].name) return *list[i].kernels;
  throw std::invalid_argument("instruction set not available: " + isa);
}

std::vector<std::tuple<std::string, bool>> isa_list() {
  int count;
  const kvsieve::IsaInfo* list = kvsieve::isa_list(&count);
  std::vector<std::tuple<std::string, bool>> result;
  for (int i = 0; i < count; i++) result.emplace_back(list[i].name, list[i].supported);
  return result;
}

// Steps and layers point into arrays; these keep the arrays alive.
struct PyLayer {
  kvsieve::Layer layer;
  std::vector<nb::object> keep;
};
struct PyStep {
  kvsieve::Step step;
  std::vector<nb::object> keep;
};

const kvsieve::Weight* weight_of(const nb::object& object) {
  return nb::cast<const kvsieve::Weight*>(object);
}

PyLayer make_layer(const kvsieve::LayerShape& shape, const nb::dict& tensors) {
  PyLayer result;
  auto vector_or_null = [&](const char* name) -> const float* {
    nb::object object = tensors[name];
    if (object.is_none()) return nullptr;
    result.keep.push_back(object);
    return nb::cast<Array<const float>>(object).data();
  };
  auto get = [&](const char* name) {
    nb::object object = tensors[name];
    result.keep.push_back(object);
    return object;
  };
  result.layer = {shape,
                  nb::cast<Array<const float>>(get("attn_norm")).data(),
                  nb::cast<Array<const float>>(get("ffn_norm")).data(),
                  vector_or_null("q_norm"),
                  vector_or_null("k_norm"),
                  vector_or_null("q_bias"),
                  vector_or_null("k_bias"),
                  vector_or_null("v_bias"),
                  vector_or_null("attn_post_norm"),
                  vector_or_null("ffn_post_norm"),
                  weight_of(get("q_proj")),
                  weight_of(get("k_proj")),
                  weight_of(get("v_proj")),
                  weight_of(get("o_proj")),
                  weight_of(get("gate_proj")),
                  weight_of(get("up_proj")),
                  weight_of(get("down_proj"))};
  return result;
}

// `fields` is what kernels/native.py makes of a Segment.
void add_segment(PyStep& self, const nb::dict& fields) {
  kvsieve::Segment s{};
  auto number = [&](const char* name) { return nb::cast<int64_t>(fields[name]); };
  auto integer = [&](const char* name) { return nb::cast<int>(fields[name]); };
  auto flag = [&](const char* name) { return nb::cast<bool>(fields[name]); };
  auto array = [&]<class T>(const char* name) -> T* {
    nb::object object = fields[name];
    if (object.is_none()) return nullptr;
    self.keep.push_back(object);
    return nb::cast<Array<T>>(object).data();
  };
  s.start = integer("start");
  s.q_len = integer("q_len");
  s.is_prefill = flag("is_prefill");
  s.is_sparse = flag("is_sparse");
  s.layout = {kvsieve::bind::cache_type(nb::cast<std::string>(fields["k_type"])),
              kvsieve::bind::cache_type(nb::cast<std::string>(fields["v_type"])),
              integer("head_dim"),
              static_cast<size_t>(number("k_scale_offset")),
              static_cast<size_t>(number("v_offset")),
              static_cast<size_t>(number("v_scale_offset")),
              static_cast<size_t>(number("page_bytes"))};
  if (s.is_sparse)
    s.plan = {kvsieve::bind::selector(nb::cast<std::string>(fields["selector"])),
              integer("k"),
              integer("block_size"),
              integer("num_probes"),
              flag("share_group"),
              integer("exact_from_tile"),
              nb::cast<float>(fields["mass"]),
              integer("k_min"),
              nb::cast<std::vector<int>>(fields["exact_layers"]),
              nb::cast<std::vector<std::pair<int, int>>>(fields["layer_k"]),
              integer("k"),
              integer("seed")};
  s.num_kv_heads = integer("num_kv_heads");
  s.pages = array.operator()<uint8_t>("pages");
  s.layer_page_bytes = static_cast<size_t>(number("layer_page_bytes"));
  s.block_table = array.operator()<int32_t>("block_table");
  s.index = array.operator()<uint8_t>("index");
  if (s.index) {
    s.layer_index_bytes = static_cast<size_t>(number("layer_index_bytes"));
    s.index_block = integer("index_block");
    s.index_step = integer("index_step");
    s.index_entries = integer("index_entries");
    s.index_is_anchors = flag("index_is_anchors");
    s.index_rule = kvsieve::bind::vector_rule(nb::cast<std::string>(fields["index_rule"]));
  }
  s.importance = array.operator()<int64_t>("importance");
  s.importance_tokens = static_cast<size_t>(number("importance_tokens"));
  s.record_importance = flag("record_importance");
  s.first_row = self.step.rows;
  self.step.rows += s.q_len;
  self.step.segments.push_back(s);
}

std::vector<int64_t> step_counts(const PyStep& self) {
  const kvsieve::StepTimes& t = self.step.times;
  std::vector<int64_t> counts = {t.dense_ns, t.attention_ns, t.select_ns};
  for (const kvsieve::Segment& s : self.step.segments) {
    counts.push_back(s.pairs_attended);
    counts.push_back(s.pairs_causal);
  }
  return counts;
}

// The lists of the last selection: (heads, tiles, lengths, blocks); length -1 means every block.
nb::tuple read_lists(const kvsieve::Engine& engine) {
  const kvsieve::Lists& lists = engine.selection().lists()[0];
  std::vector<int> lengths(lists.lengths.begin(), lists.lengths.end()), blocks;
  for (int head = 0; head < lists.heads; head++)
    for (int tile = 0; tile < lists.tiles; tile++)
      for (int i = 0; i < lists.length(head, tile); i++) blocks.push_back(lists.row(head, tile)[i]);
  return nb::make_tuple(lists.heads, lists.tiles, lengths, blocks);
}

// What the last layer attended with: queries and outputs are copied to q and out [rows][Hq][D].
nb::tuple read_attention(const kvsieve::Engine& engine, const Array<float>& q,
                         const Array<float>& out) {
  std::copy_n(engine.queries(), q.size(), q.data());
  std::copy_n(engine.attended(), out.size(), out.data());
  return read_lists(engine);
}

std::vector<kvsieve::Lists> make_lists(int heads, int tiles, const std::vector<int>& lengths,
                                       const std::vector<int>& blocks) {
  kvsieve::Lists lists;
  int capacity = 0;
  for (int length : lengths) capacity = length > capacity ? length : capacity;
  lists.reset(heads, tiles, capacity);
  size_t next = 0;
  for (int row = 0; row < heads * tiles; row++) {
    lists.lengths[row] = lengths[row];
    for (int i = 0; i < lengths[row]; i++)
      lists.blocks[static_cast<size_t>(row) * capacity + i] = blocks[next++];
  }
  std::vector<kvsieve::Lists> result;
  result.push_back(std::move(lists));
  return result;
}

}  // namespace

NB_MODULE(_native, m) {
  // A service's thread may still hold its engine when the interpreter ends; that is no leak.
  nb::set_leak_warnings(false);
  m.doc() = "The C++ core of kvsieve. Use it through kvsieve.kernels.native.";
  m.def("isa_list", &isa_list, "Instruction sets built in, best first: (name, supported here).");
  nb::class_<kvsieve::Arena>(m, "Arena").def(nb::init<>());

  nb::class_<kvsieve::Weight>(m, "Weight")
      .def(
          "__init__",
          [](kvsieve::Weight* self, const std::string& format, int rows, int cols,
             const std::string& kind, std::shared_ptr<kvsieve::Arena> arena) {
            new (self) kvsieve::Weight(kvsieve::bind::source_format(format), rows, cols,
                                       kvsieve::bind::weight_kind(kind), std::move(arena));
          },
          "format"_a, "rows"_a, "cols"_a, "kind"_a, "arena"_a)
      .def(
          "fill",
          [](kvsieve::Weight& self, const AnyArray& data, int first) {
            const int count = static_cast<int>(data.shape(0));
            nb::gil_scoped_release release;
            return self.fill(data.data(), first, count);
          },
          "data"_a, "first"_a)
      .def_prop_ro("rows", [](const kvsieve::Weight& w) { return w.view().rows; })
      .def_prop_ro("cols", [](const kvsieve::Weight& w) { return w.view().cols; })
      .def_prop_ro("nbytes", &kvsieve::Weight::bytes);

  nb::class_<PyLayer>(m, "Layer")
      .def(
          "__init__",
          [](PyLayer* self, int hidden_size, int intermediate_size, int num_q_heads,
             int num_kv_heads, int head_dim, float rms_norm_eps, bool rope_interleaved,
             int rope_dim, float attention_scale, bool gelu, int window, const nb::dict& tensors) {
            new (self) PyLayer(make_layer({hidden_size,
                                           intermediate_size,
                                           {num_q_heads, num_kv_heads, head_dim, window},
                                           rms_norm_eps,
                                           rope_interleaved,
                                           rope_dim,
                                           attention_scale,
                                           gelu},
                                          tensors));
          },
          nb::kw_only(), "hidden_size"_a, "intermediate_size"_a, "num_q_heads"_a, "num_kv_heads"_a,
          "head_dim"_a, "rms_norm_eps"_a, "rope_interleaved"_a, "rope_dim"_a, "attention_scale"_a,
          "gelu"_a, "window"_a, "tensors"_a);

  nb::class_<PyStep>(m, "Step")
      .def(
          "__init__",
          [](PyStep* self, const Array<const float>& cos, const Array<const float>& sin) {
            new (self) PyStep();
            self->keep.push_back(nb::cast(cos));
            self->keep.push_back(nb::cast(sin));
            self->step.cos = cos.data();
            self->step.sin = sin.data();
          },
          "cos"_a, "sin"_a)
      .def("add_segment", &add_segment, "fields"_a)
      .def_prop_ro("rows", [](const PyStep& s) { return s.step.rows; })
      .def("counts", &step_counts)
      .def("kept_mass",
           [](const PyStep& s, int segment) { return s.step.segments[segment].kept_mass; });

  nb::class_<kvsieve::Engine>(m, "Engine")
      .def(
          "__init__",
          [](kvsieve::Engine* self, const std::string& isa, int threads) {
            new (self) kvsieve::Engine(find_kernels(isa), threads);
          },
          "isa"_a, "threads"_a)
      .def_prop_ro("threads", &kvsieve::Engine::threads)
      .def(
          "run_layer",
          [](kvsieve::Engine& self, const PyLayer& layer, int index, Array<float> hidden,
             PyStep& step, std::optional<Array<const int32_t>> kept) {
            nb::gil_scoped_release release;
            if (!kept) return self.run_layer(layer.layer, index, hidden.data(), step.step);
            // An empty array may have no address.
            static const int32_t nothing = 0;
            return self.run_layer(layer.layer, index, hidden.data(), step.step,
                                  kept->size() ? kept->data() : &nothing,
                                  static_cast<int>(kept->size()));
          },
          "layer"_a, "index"_a, "hidden"_a, "step"_a, "kept"_a.none())
      .def(
          "project",
          [](kvsieve::Engine& self, const Array<const float>& x, const kvsieve::Weight& weight,
             Array<float> y) {
            const int rows = static_cast<int>(y.size() / weight.view().rows);
            nb::gil_scoped_release release;
            return self.project(x.data(), rows, weight, y.data());
          },
          "x"_a, "weight"_a, "y"_a)
      .def(
          "rms_norm",
          [](kvsieve::Engine& self, const Array<const float>& x, const Array<const float>& weight,
             float eps, Array<float> y) {
            const int n = static_cast<int>(weight.size());
            for (size_t at = 0; at < x.size(); at += n)
              self.kernels().rms_norm(x.data() + at, weight.data(), eps, n, y.data() + at);
          },
          "x"_a, "weight"_a, "eps"_a, "y"_a)
      .def(
          "silu_mul",
          [](kvsieve::Engine& self, const Array<const float>& gate, const Array<const float>& up,
             Array<float> y) {
            self.kernels().silu_mul(gate.data(), up.data(), static_cast<int>(y.size()), y.data());
          },
          "gate"_a, "up"_a, "y"_a)
      .def(
          "gelu_mul",
          [](kvsieve::Engine& self, const Array<const float>& gate, const Array<const float>& up,
             Array<float> y) {
            self.kernels().gelu_mul(gate.data(), up.data(), static_cast<int>(y.size()), y.data());
          },
          "gate"_a, "up"_a, "y"_a)
      .def(
          "rope",
          [](kvsieve::Engine& self, Array<float> x, const Array<const float>& cos,
             const Array<const float>& sin, bool interleaved) {
            const size_t heads = x.shape(1), d = x.shape(2), half = cos.shape(1);
            for (size_t i = 0; i < x.shape(0) * heads; i++)
              self.kernels().rope(x.data() + i * d, cos.data() + i / heads * half,
                                  sin.data() + i / heads * half, static_cast<int>(2 * half),
                                  interleaved);
          },
          "x"_a, "cos"_a, "sin"_a, "interleaved"_a)
      .def(
          "append",
          [](kvsieve::Engine& self, PyStep& step, int layer, Array<float> k,
             const Array<const float>& v) {
            nb::gil_scoped_release release;
            return self.append(step.step, layer, k.data(), v.data());
          },
          "step"_a, "layer"_a, "k"_a, "v"_a)
      .def(
          "score",
          [](kvsieve::Engine& self, PyStep& step, int layer, Array<float> q, int num_kv_heads,
             float scale, Array<float> out) {
            const kvsieve::HeadShape shape{static_cast<int>(q.shape(1)), num_kv_heads,
                                           static_cast<int>(q.shape(2))};
            nb::gil_scoped_release release;
            return self.score(step.step, shape, layer, q.data(), scale, out.data(),
                              static_cast<int>(out.shape(1)));
          },
          "step"_a, "layer"_a, "q"_a, "num_kv_heads"_a, "scale"_a, "out"_a)
      .def(
          "select",
          [](kvsieve::Engine& self, PyStep& step, int layer, Array<float> q, int num_kv_heads,
             float scale) {
            const kvsieve::HeadShape shape{static_cast<int>(q.shape(1)), num_kv_heads,
                                           static_cast<int>(q.shape(2))};
            if (!self.select(step.step, shape, layer, q.data(), scale))
              return nb::object(nb::none());
            return nb::object(read_lists(self));
          },
          "step"_a, "layer"_a, "q"_a, "num_kv_heads"_a, "scale"_a)
      .def(
          "attend",
          [](kvsieve::Engine& self, PyStep& step, int layer, Array<float> q, int num_kv_heads,
             float scale, int heads, int tiles, const std::vector<int>& lengths,
             const std::vector<int>& blocks, Array<float> out) {
            const kvsieve::HeadShape shape{static_cast<int>(q.shape(1)), num_kv_heads,
                                           static_cast<int>(q.shape(2))};
            nb::gil_scoped_release release;
            return self.attend(step.step, shape, layer, q.data(), scale,
                               make_lists(heads, tiles, lengths, blocks), out.data());
          },
          "step"_a, "layer"_a, "q"_a, "num_kv_heads"_a, "scale"_a, "heads"_a, "tiles"_a,
          "lengths"_a, "blocks"_a, "out"_a)
      .def("last_attention", &read_attention, "q"_a, "out"_a)
      .def("score_stride", [](kvsieve::Engine&, const PyStep& step) {
        return kvsieve::Selection::score_stride(step.step.segments[0]);
      });
}
