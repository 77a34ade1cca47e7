// Parity of what selectors `anchors` and those by vectors compute from their indexes.
#include "check.h"
#include "data.h"

namespace kvsieve::test {

constexpr int kHeadDims[] = {16, 32, 48, 64, 80, 96, 128, 256};

bool check_anchor_logits(Pair kernels) {
  Check check("anchor_logits");
  Random random(11);
  for (int d : kHeadDims)
    for (int rows = 1; rows <= kMaxRows; rows++) {
      const size_t codes = static_cast<size_t>(kAnchorVectors) * d * kIndexLanes;
      const int floats = (kAnchorVectors + kAnchorBands) * kIndexLanes;
      auto record = random.bytes(codes + static_cast<size_t>(floats) * 4);
      for (int i = 0; i < floats; i++) {
        // Unwritten lanes are read too, here as NaN.
        const float value =
            i % kIndexLanes == 15 ? std::bit_cast<float>(0x7fc00000u) : random.positive();
        std::memcpy(record.data() + codes + 4 * i, &value, 4);
      }
      const Folded q(kernels.expected, rows, d, 1, random);
      std::vector<AnchorRow> about(rows);
      for (AnchorRow& row : about) {
        row.offset = -128 * static_cast<int>(100 * random.positive());
        for (float& energy : row.energy) energy = random.positive();
      }
      const int stride = 20, vector_stride = stride * kMaxRows;
      std::vector<float> got(vector_stride * kAnchorVectors, 7), expected(got);
      kernels.got.anchor_logits(record.data(), d, q.view(), about.data(), rows, got.data(), stride,
                                vector_stride);
      kernels.expected.anchor_logits(record.data(), d, q.view(), about.data(), rows,
                                     expected.data(), stride, vector_stride);
      for (int v = 0; v < kAnchorVectors; v++)
        for (int r = 0; r < rows; r++)
          check.same(&got[v * vector_stride + r * stride],
                     &expected[v * vector_stride + r * stride], 15,
                     name("head_dim", d) + name(", rows", rows) + name(", vector", v));
    }
  return check.report(kernels.got.name);
}

bool check_block_masses(Pair kernels) {
  Check check("block_masses");
  Random random(12);
  for (int indexed : {1, 15, 16, 17, 40})
    for (int num_recent : {33, 47, 48, 49, 64}) {
      const int stride = 48;
      std::vector<float> logits(stride * kAnchorVectors), recent(2 * kBlock);
      for (float& x : logits) x = 32 * random.positive() - 16;  // exact, fused or not
      for (float& x : recent) x = 32 * random.positive() - 16;  // exact, fused or not
      for (int v = 0; v < kAnchorVectors; v++)                  // behind the last block
        for (int b = indexed; b < stride; b++) logits[v * stride + b] = __builtin_nanf("");
      for (int t = num_recent; t < 2 * kBlock; t++) recent[t] = __builtin_nanf("");
      std::vector<float> got(stride, 7), expected(got), logits2(logits), recent2(recent);
      const float top = kernels.got.block_masses(logits.data(), stride, indexed, recent.data(),
                                                 num_recent, got.data());
      const float expected_top = kernels.expected.block_masses(
          logits2.data(), stride, indexed, recent2.data(), num_recent, expected.data());
      const std::string where = name("blocks", indexed) + name(", recent", num_recent);
      check.same(&top, &expected_top, 1, where + ", top");
      check.same(got.data(), expected.data(), indexed + 2, where);
    }
  return check.report(kernels.got.name);
}

bool check_exact_masses(Pair kernels) {
  Check check("exact_masses");
  Random random(13);
  for (int pages : {1, 2, 17})
    for (float top : {-20.0f, 3.0f, 20.0f}) {
      std::vector<float> logits(pages * kBlock), got(pages, 7), expected(got);
      for (float& x : logits) x = 32 * random.positive() - 16;
      const float got_top = kernels.got.exact_masses(logits.data(), pages, top, got.data());
      const float expected_top =
          kernels.expected.exact_masses(logits.data(), pages, top, expected.data());
      const std::string where = name("pages", pages);
      check.same(&got_top, &expected_top, 1, where + ", top");
      check.same(got.data(), expected.data(), pages, where);
    }
  return check.report(kernels.got.name);
}

bool check_add_shares(Pair kernels) {
  Check check("add_shares");
  Random random(14);
  for (int count : {1, 15, 16, 17, 40})
    for (bool add : {false, true}) {
      std::vector<float> masses(48, __builtin_nanf("")), got(48, 0.01f), expected(got);
      for (int b = 0; b < count; b++) masses[b] = random.positive();
      kernels.got.add_shares(masses.data(), count, add, got.data());
      kernels.expected.add_shares(masses.data(), count, add, expected.data());
      check.same(got.data(), expected.data(), count, name("blocks", count));
    }
  return check.report(kernels.got.name);
}

}  // namespace kvsieve::test
