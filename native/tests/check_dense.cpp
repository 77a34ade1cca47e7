// Parity of projections and row operations.
#include "check.h"
#include "data.h"

namespace kvsieve::test {

// Activations with their own memory; codes and sums are made by the scalar kernel.
struct Rows {
  std::vector<float> values, scale, sum;
  std::vector<int8_t> codes;
  std::vector<int32_t> codes_sum;
  int cols;

  Rows(std::vector<float> x, int cols)
      : values(std::move(x)),
        scale(values.size() / kGroup, 7),
        sum(scale),
        codes(values.size(), 7),
        codes_sum(scale.size(), 7),
        cols(cols) {}
  Activations view() {
    return {values.data(), codes.data(), scale.data(), sum.data(), codes_sum.data(), cols};
  }
  int count() const { return static_cast<int>(values.size()) / cols; }
};

bool check_quantize_row(Pair kernels) {
  Check check("quantize_row");
  Random random(1);
  for (int cols : {32, 64, 96, 576})
    for (int kind = 0; kind < static_cast<int>(Row::count); kind++) {
      Rows got(row_of(static_cast<Row>(kind), 2 * cols, random), cols), expected = got;
      const std::string where = name("cols", cols) + name(", kind of row", kind);
      for (int row = 0; row < 2; row++) {
        // The got row in two pieces: groups do not depend on each other.
        const int groups = cols / kGroup, cut = groups / 2;
        const bool first = kernels.got.quantize_row(got.view(), row, 0, cut);
        const uint8_t finite[] = {kernels.got.quantize_row(got.view(), row, cut, groups) && first,
                                  kernels.expected.quantize_row(expected.view(), row, 0, groups)};
        check.same(&finite[0], &finite[1], 1, where + ", accepted");
      }
      if (!is_finite(static_cast<Row>(kind))) continue;
      check.same(got.codes, expected.codes, where + ", codes");
      check.same(got.scale, expected.scale, where + ", scale");
      check.same(got.sum, expected.sum, where + ", sum");
      check.same(got.codes_sum, expected.codes_sum, where + ", codes_sum");
    }
  return check.report(kernels.got.name);
}

// Every byte pattern may be a weight's codes: the extremes of both operands meet.
bool check_project(Pair kernels) {
  Check check("project");
  Random random(2);
  struct Shape {
    int outputs, cols;
  };
  for (auto [outputs, cols] : {Shape{16, 32}, {1, 32}, {40, 96}, {33, 160}, {48, 576}})
    for (int format = 0; format < 4; format++)
      for (int tokens : {1, 2, 3, 4, 5, 7, 8, 9, 13, 70}) {
        const int panels = (outputs + kPanel - 1) / kPanel, groups = cols / kGroup;
        const auto codes = random.bytes(static_cast<size_t>(panels) * kPanel * cols);
        const auto d = halves(static_cast<size_t>(panels) * groups * kPanel, random);
        const auto m = halves(d.size(), random);
        const auto values = random.floats(static_cast<size_t>(panels) * kPanel * cols);
        const WeightKind kind = format == 0   ? WeightKind::f32
                                : format == 1 ? WeightKind::q8
                                              : WeightKind::q4;
        const WeightView w = {kind,
                              outputs,
                              cols,
                              format == 1   ? 128
                              : format == 2 ? 8
                                            : 0,
                              codes.data(),
                              d.data(),
                              format == 3 ? m.data() : nullptr,
                              values.data()};
        Rows x(row_of(tokens % 3 ? Row::ordinary : Row::equal, tokens * cols, random), cols);
        for (int row = 0; row < tokens; row++)
          kernels.expected.quantize_row(x.view(), row, 0, cols / kGroup);
        const int stride = panels * kPanel + 5, first = panels > 2 ? 1 : 0;
        const auto before = random.floats(static_cast<size_t>(tokens) * stride);
        for (bool add : {false, true}) {
          auto got = before, expected = before;
          kernels.got.project(w, x.view(), tokens, first, panels, got.data(), stride, add);
          kernels.expected.project(w, x.view(), tokens, first, panels, expected.data(), stride,
                                   add);
          check.same(got, expected,
                     name("outputs", outputs) + name(", cols", cols) + name(", format", format) +
                         name(", tokens", tokens));
        }
      }
  return check.report(kernels.got.name);
}

// -- row operations ----------------------------------------------------------------------------

bool check_rms_norm(Pair kernels) {
  Check check("rms_norm");
  Random random(3);
  for (int n : {16, 32, 64, 576, 2048})
    for (int i = 0; i < 80; i++) {  // many: a sum's order shows in few of them
      const Row kind = i == 0   ? Row::zero
                       : i == 1 ? Row::subnormal
                       : i < 10 ? Row::wide
                                : Row::ordinary;
      const auto x = row_of(kind, n, random), weight = random.floats(n);
      std::vector<float> got(n), expected(n);
      kernels.got.rms_norm(x.data(), weight.data(), 1e-5f, n, got.data());
      kernels.expected.rms_norm(x.data(), weight.data(), 1e-5f, n, expected.data());
      check.same(got, expected, name("n", n) + name(", kind of row", static_cast<int>(kind)));
    }
  return check.report(kernels.got.name);
}

static bool check_gate(Pair kernels, const char* kernel,
                       decltype(Kernels::silu_mul) Kernels::* function, int seed) {
  Check check(kernel);
  Random random(seed);
  for (float scale : {1.0f, 20.0f, 200.0f, 1e30f, 1e-30f})
    for (int n : {16, 64, 1536, 6144}) {
      const auto gate = random.floats(n, scale), up = random.floats(n, 3);
      std::vector<float> got(n), expected(n);
      (kernels.got.*function)(gate.data(), up.data(), n, got.data());
      (kernels.expected.*function)(gate.data(), up.data(), n, expected.data());
      check.same(got, expected, name("n", n) + ", gates up to " + std::to_string(scale));
    }
  return check.report(kernels.got.name);
}

bool check_silu_mul(Pair kernels) { return check_gate(kernels, "silu_mul", &Kernels::silu_mul, 4); }

bool check_gelu_mul(Pair kernels) {
  return check_gate(kernels, "gelu_mul", &Kernels::gelu_mul, 14);
}

bool check_rope(Pair kernels) {
  Check check("rope");
  Random random(5);
  for (int dim : {2, 6, 16, 32, 64, 80, 128, 256})
    for (bool interleaved : {false, true}) {
      const auto x = random.floats(dim + 16, 4), cos = random.floats(dim / 2),
                 sin = random.floats(dim / 2);
      auto got = x, expected = x;
      kernels.got.rope(got.data(), cos.data(), sin.data(), dim, interleaved);
      kernels.expected.rope(expected.data(), cos.data(), sin.data(), dim, interleaved);
      check.same(got, expected, name("dim", dim) + name(", interleaved", interleaved));
    }
  return check.report(kernels.got.name);
}

bool check_exp(Pair kernels) {
  Check check("exp");
  Random random(6);
  std::vector<float> x = {0.0f,  -0.0f,  88.0f,     88.1f,     -87.0f,   -87.1f,
                          1e30f, -1e30f, 0x1p-149f, -0x1p-30f, -86.999f, 87.999f};
  x.insert(x.end(), {__builtin_inff(), -__builtin_inff(), std::bit_cast<float>(0x7fc00000u)});
  for (int i = 0; i < 20000; i++) x.push_back(random.unit() * 90);
  // Arguments whose multiple of 1 / ln 2 lies next to a half, where rounding changes direction.
  for (int n = -125; n < 126; n++) {
    const float half = (static_cast<float>(n) + 0.5f) * 0.693147182f;
    x.insert(x.end(), {std::nextafterf(half, -200), half, std::nextafterf(half, 200)});
  }
  for (float value : x) {
    const float got = kernels.got.exp(value), expected = kernels.expected.exp(value);
    check.same(&got, &expected, 1, "exp(" + std::to_string(value) + ")");
  }
  return check.report(kernels.got.name);
}

}  // namespace kvsieve::test
