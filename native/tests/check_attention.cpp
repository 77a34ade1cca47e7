// Parity of the cache and of attention.
#include "check.h"
#include "data.h"

namespace kvsieve::test {

constexpr int kHeadDims[] = {16, 32, 48, 64, 80, 96, 128, 256};
constexpr CacheType kCacheTypes[] = {CacheType::f32, CacheType::f16, CacheType::q8, CacheType::q4};
constexpr uint8_t kPoison = 0xff;  // NaN in f32 and f16

static size_t data_bytes(CacheType type, int d) {
  const size_t values = static_cast<size_t>(kBlock) * d;
  switch (type) {
    case CacheType::f32: return 4 * values;
    case CacheType::f16: return 2 * values;
    case CacheType::q8: return values;
    case CacheType::q4: return values / 2;
  }
  return 0;
}

static size_t scale_bytes(CacheType type, int d) {
  return type == CacheType::q8 ? 4 * kBlock : type == CacheType::q4 ? 4 * kBlock * d / kGroup : 0;
}

static bool holds(CacheType type, int head_dim) {
  return type != CacheType::q4 || head_dim % kGroup == 0;
}

static PageLayout layout_of(CacheType k_type, CacheType v_type, int d) {
  PageLayout layout = {k_type, v_type, d, data_bytes(k_type, d), 0, 0, 0};
  layout.v = layout.k_scale + scale_bytes(k_type, d);
  layout.v_scale = layout.v + data_bytes(v_type, d);
  layout.bytes = (layout.v_scale + scale_bytes(v_type, d) + 63) / 64 * 64;
  return layout;
}

// Calls f for every pair of types and every head size that they can hold.
template <class Function>
static void for_each_layout(const Function& f) {
  for (int head_dim : kHeadDims)
    for (CacheType k_type : kCacheTypes)
      for (CacheType v_type : kCacheTypes)
        if (holds(k_type, head_dim) && holds(v_type, head_dim))
          f(layout_of(k_type, v_type, head_dim), name("head_dim", head_dim) +
                                                     name(", k type", static_cast<int>(k_type)) +
                                                     name(", v type", static_cast<int>(v_type)));
}

bool check_append(Pair kernels) {
  Check check("append");
  Random random(7);
  for_each_layout([&](const PageLayout& layout, const std::string& where) {
    std::vector<uint8_t> got(layout.bytes, kPoison), expected = got;
    for (int kind = 0; kind < static_cast<int>(Row::count); kind++) {
      const int slot = (kind * 7 + random.below(3)) % kBlock;
      const auto k = row_of(static_cast<Row>(kind), layout.head_dim, random);
      const auto v = row_of(kind % 2 ? Row::wide : static_cast<Row>(kind), layout.head_dim, random);
      const uint8_t fits[] = {
          kernels.got.append(layout, got.data(), slot, k.data(), v.data()),
          kernels.expected.append(layout, expected.data(), slot, k.data(), v.data())};
      check.same(&fits[0], &fits[1], 1, where + name(", accepted row", kind));
      check.same(got, expected, where + name(", kind of row", kind));
    }
  });
  return check.report(kernels.got.name);
}

bool check_fold_query(Pair kernels) {
  Check check("fold_query");
  Random random(8);
  for (int d : kHeadDims)
    for (int groups : {1, d / kGroup})
      for (int kind = 0; groups > 0 && kind < static_cast<int>(Row::count); kind++) {
        auto got = row_of(static_cast<Row>(kind), d, random), expected = got;
        std::vector<int8_t> got_codes(d), expected_codes(d);
        std::vector<int32_t> got_sums(groups), expected_sums(groups);
        float scales[2] = {};
        const uint8_t finite[] = {
            kernels.got.fold_query(got.data(), 0.125f, d, groups, got_codes.data(), &scales[0],
                                   got_sums.data()),
            kernels.expected.fold_query(expected.data(), 0.125f, d, groups, expected_codes.data(),
                                        &scales[1], expected_sums.data())};
        const std::string where = name("head_dim", d) + name(", kind of row", kind);
        check.same(&finite[0], &finite[1], 1, where + ", accepted");
        if (!finite[1]) continue;
        check.same(got, expected, where);
        check.same(got_codes, expected_codes, where + ", codes");
        check.same(&scales[0], &scales[1], 1, where + ", scale");
        check.same(got_sums, expected_sums, where + ", sums");
      }
  return check.report(kernels.got.name);
}

// -- attention ---------------------------------------------------------------------------------

// Pages with `tokens` tokens in all; what lies behind the last is `filler`.
static std::vector<std::vector<uint8_t>> pages_of(const Kernels& scalar, const PageLayout& layout,
                                                  int tokens, uint8_t filler, Random random) {
  std::vector<std::vector<uint8_t>> pages;
  for (int t = 0; t < tokens; t++) {
    if (t % kBlock == 0) pages.emplace_back(layout.bytes, filler);
    const Row kind = random.one_in(8) ? Row::zero : random.one_in(4) ? Row::equal : Row::ordinary;
    const auto k = row_of(kind, layout.head_dim, random), v = row_of(kind, layout.head_dim, random);
    scalar.append(layout, pages.back().data(), t % kBlock, k.data(), v.data());
  }
  return pages;
}

bool check_page_logits(Pair kernels) {
  Check check("page_logits");
  Random random(9);
  for (int d : kHeadDims)
    for (CacheType type : kCacheTypes)
      for (int rows = 1; holds(type, d) && rows <= kMaxRows; rows++) {
        const PageLayout layout = layout_of(type, CacheType::f32, d);
        const int tokens = rows % 2 ? kBlock : 1 + random.below(kBlock), stride = kBlock + 8;
        const auto page = pages_of(kernels.expected, layout, tokens, kPoison, random)[0];
        const Folded q(kernels.expected, rows, d, layout.k_groups(), random);
        std::vector<float> got(rows * stride, 7), expected(got);
        kernels.got.page_logits(layout, page.data(), q.view(), rows, got.data(), stride);
        kernels.expected.page_logits(layout, page.data(), q.view(), rows, expected.data(), stride);
        for (int r = 0; r < rows; r++) {
          const std::string where = name("head_dim", d) + name(", type", static_cast<int>(type)) +
                                    name(", rows", rows) + name(", row", r);
          check.same(&got[r * stride], &expected[r * stride], tokens, where);
          check.same(&got[r * stride + kBlock], &expected[r * stride + kBlock], 8,
                     where + ", behind the page");
        }
      }
  return check.report(kernels.got.name);
}

bool check_index_scores(Pair kernels) {
  Check check("index_scores");
  Random random(10);
  for (int d : kHeadDims)
    for (auto [entries, step] : {std::pair{1, 1}, {4, 1}, {5, 2}})
      for (int rows = 1; rows <= kMaxRows; rows++) {
        const size_t keys = static_cast<size_t>(entries) * d * kIndexLanes;
        auto record = random.bytes(keys + static_cast<size_t>(entries) * kIndexLanes * 4);
        for (int i = 0; i < entries * kIndexLanes; i++) {
          // Unwritten lanes are read too: their scale may be anything, here NaN.
          const float scale =
              i % kIndexLanes == 15 ? std::bit_cast<float>(0x7fc00000u) : random.positive();
          std::memcpy(record.data() + keys + 4 * i, &scale, 4);
        }
        const Folded q(kernels.expected, rows, d, 1, random);
        std::vector<float> got(rows * 20, 7), expected(got);
        kernels.got.index_scores(record.data(), record.data(), entries, step, d, q.view(), rows,
                                 got.data(), 20);
        kernels.expected.index_scores(record.data(), record.data(), entries, step, d, q.view(),
                                      rows, expected.data(), 20);
        for (int r = 0; r < rows; r++)
          check.same(&got[r * 20], &expected[r * 20], 15,
                     name("head_dim", d) + name(", entries", entries) + name(", rows", rows));
      }
  return check.report(kernels.got.name);
}

bool check_vector_scores(Pair kernels) {
  Check check("vector_scores");
  Random random(14);
  for (int d : kHeadDims)
    for (int vectors = 1; vectors <= kVectors; vectors++)
      for (int rows = 1; rows <= kMaxRows; rows++) {
        const size_t bytes = static_cast<size_t>(vectors) * d * kIndexLanes;
        auto record = random.bytes(bytes + static_cast<size_t>(vectors) * kIndexLanes * 4);
        for (int i = 0; i < vectors * kIndexLanes; i++) {
          // Unwritten lanes are read too, here as NaN.
          const float scale =
              i % kIndexLanes == 15 ? std::bit_cast<float>(0x7fc00000u) : random.positive();
          std::memcpy(record.data() + bytes + 4 * i, &scale, 4);
        }
        // The largest magnitudes of one sign, as bounds meet them, and any others.
        std::vector<int8_t> codes(static_cast<size_t>(vectors) * kMaxRows * d);
        for (int8_t& code : codes)
          code = static_cast<int8_t>(rows % 2 ? 127 : random.below(255) - 127);
        std::vector<int32_t> offsets(vectors * kMaxRows);
        for (int32_t& offset : offsets) offset = -128 * random.below(127 * d);
        const auto scales = random.floats(rows);
        const VectorQueries q{codes.data(), offsets.data(), scales.data(), 1};
        std::vector<float> got(rows * 20, 7), expected(got);
        kernels.got.vector_scores(record.data(), record.data(), vectors, d, q, rows, got.data(),
                                  20);
        kernels.expected.vector_scores(record.data(), record.data(), vectors, d, q, rows,
                                       expected.data(), 20);
        for (int r = 0; r < rows; r++)
          check.same(&got[r * 20], &expected[r * 20], 15,
                     name("head_dim", d) + name(", vectors", vectors) + name(", rows", rows));
      }
  return check.report(kernels.got.name);
}

// A run's outcome; weights are exp(logit - m) of the listed pages.
struct Outcome {
  std::vector<float> weights, o, m, s;
};

static Outcome attend(const Kernels& kernels, const PageLayout& layout,
                      const std::vector<std::vector<uint8_t>>& pages, const Folded& q,
                      const std::vector<int>& visible, int window) {
  const int rows = static_cast<int>(visible.size()), n = static_cast<int>(pages.size());
  std::vector<const uint8_t*> at;
  std::vector<int> blocks;
  for (int p = 0; p < n; p++) {
    at.push_back(pages[p].data());
    blocks.push_back(p);
  }
  std::vector<float> logits(rows * kRunTokens, __builtin_nanf(""));
  std::vector<uint8_t> codes(static_cast<size_t>(rows) * layout.v_groups() * kRunTokens, kPoison);
  Outcome out{{},
              std::vector<float>(rows * layout.head_dim, __builtin_nanf("")),
              std::vector<float>(rows),
              std::vector<float>(rows)};
  // As decode calls it: asking for pages ahead must change nothing.
  kernels.attend_run({&layout, at.data(), blocks.data(), n, true, at.data(), n, q.view(), rows,
                      visible.data(), logits.data(), codes.data(), out.o.data(), out.m.data(),
                      out.s.data(), window});
  for (int r = 0; r < rows; r++)
    out.weights.insert(out.weights.end(), logits.begin() + r * kRunTokens,
                       logits.begin() + r * kRunTokens + n * kBlock);
  return out;
}

bool check_attend_run(Pair kernels) {
  Check check("attend_run");
  Random random(11);
  int rows = 0;
  for_each_layout([&](const PageLayout& layout, const std::string& layout_name) {
    for (int tokens : {1, 17, kBlock, 75, layout.head_dim > 128 ? 96 : kRunTokens}) {
      rows = rows % kMaxRows + 1;
      const Folded q(kernels.expected, rows, layout.head_dim, layout.k_groups(), random);
      // Rows see different parts, the last all; one may see nothing of this run.
      std::vector<int> visible(rows, tokens);
      for (int r = 0; r + 1 < rows; r++) visible[r] = random.below(tokens + 1);
      const auto poisoned = pages_of(kernels.expected, layout, tokens, kPoison, random);
      const auto cleared = pages_of(kernels.expected, layout, tokens, 0, random);
      // A window may leave out whole pages, or everything that a row could see here.
      const int window = random.one_in(2) ? 1 + random.below(2 * tokens) : 0;
      const Outcome expected = attend(kernels.expected, layout, poisoned, q, visible, window);
      for (const auto& [pages, filler] :
           {std::pair{&poisoned, " poisoned"}, {&cleared, " clear"}}) {
        const Outcome got = attend(kernels.got, layout, *pages, q, visible, window);
        const std::string where = layout_name + name(", tokens", tokens) + name(", rows", rows) +
                                  name(", window", window) + ", behind the last token" + filler;
        check.same(got.m, expected.m, where + ", maximum");
        check.same(got.s, expected.s, where + ", sum");
        check.same(got.weights, expected.weights, where + ", weights");
        check.same(got.o, expected.o, where + ", output");
      }
    }
  });
  return check.report(kernels.got.name);
}

bool check_merge_and_finish(Pair kernels) {
  Check check("merge, finish");
  Random random(12);
  const float none = -__builtin_inff();
  for (int d : kHeadDims)
    for (float m : {none, -3.0f, 0.25f, 80.0f})
      for (float m2 : {none, -200.0f, 0.25f, 11.5f}) {
        const auto o2 = random.floats(d, 50);
        auto got = random.floats(d, 50), expected = got;
        float got_m = m, got_s = 1 + random.positive(), expected_m = m, expected_s = got_s;
        kernels.got.merge(got.data(), &got_m, &got_s, o2.data(), m2, 1.7f, d);
        kernels.expected.merge(expected.data(), &expected_m, &expected_s, o2.data(), m2, 1.7f, d);
        const std::string where =
            name("head_dim", d) + ", maxima " + std::to_string(m) + ", " + std::to_string(m2);
        check.same(got, expected, where);
        check.same(&got_m, &expected_m, 1, where + ", maximum");
        check.same(&got_s, &expected_s, 1, where + ", sum");
        kernels.got.finish(got.data(), got_s, d);
        kernels.expected.finish(expected.data(), expected_s, d);
        check.same(got, expected, where + ", finished");
      }
  return check.report(kernels.got.name);
}

bool check_add_importance(Pair kernels) {
  Check check("add_importance");
  Random random(13);
  for (int n : {16, 32, kRunTokens})
    for (float factor : {1.0f, 0.5f, 0.3f, 0x1p-24f, 0.0f}) {
      auto p = random.floats(n);
      for (float& x : p) x = std::fabs(x);
      p[0] = 1;
      p[1] = 0x1.8p-24f;  // half way between two units
      std::vector<int32_t> got(n), expected;
      for (int32_t& x : got) x = random.below(1 << 29);
      expected = got;
      kernels.got.add_importance(p.data(), factor, n, got.data());
      kernels.expected.add_importance(p.data(), factor, n, expected.data());
      check.same(got, expected, name("n", n) + ", factor " + std::to_string(factor));
    }
  return check.report(kernels.got.name);
}

}  // namespace kvsieve::test
