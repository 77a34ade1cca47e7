// Random inputs for the parity test, the same on every machine, edge cases among them.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <vector>

#include "kvsieve/half.h"
#include "kvsieve/kernels.h"

namespace kvsieve::test {

// SplitMix64: its own generator and no <random>, whose distributions differ between libraries.
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}
  uint64_t bits() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
  }
  int below(int n) { return static_cast<int>(bits() % n); }
  bool one_in(int n) { return below(n) == 0; }
  // In [-1, 1), with 24 bits.
  float unit() { return static_cast<float>(static_cast<int>(bits() >> 39) - (1 << 24)) * 0x1p-24f; }
  float positive() { return std::fabs(unit()) + 0x1p-20f; }

  std::vector<uint8_t> bytes(size_t count) {
    std::vector<uint8_t> all(count);
    for (uint8_t& x : all) x = static_cast<uint8_t>(bits() >> 56);
    return all;
  }
  std::vector<float> floats(size_t count, float scale = 1) {
    std::vector<float> all(count);
    for (float& x : all) x = unit() * scale;
    return all;
  }

 private:
  uint64_t state_;
};

// A row as the cache and the quantisers may meet it: ordinary, zero, equal magnitudes, codes that
// lie half way between two, subnormal, huge, with a NaN, an infinity, or more than f16 holds.
enum class Row { ordinary, zero, equal, ties, subnormal, tiny, huge, wide, nan, infinite, count };

inline bool is_finite(Row kind) { return kind < Row::nan; }

inline std::vector<float> row_of(Row kind, int n, Random& random) {
  std::vector<float> x = random.floats(n, 3);
  const int at = random.below(n);
  for (int i = 0; i < n; i++) {
    switch (kind) {
      case Row::zero: x[i] = random.one_in(2) ? 0.0f : -0.0f; break;
      case Row::equal: x[i] = random.one_in(2) ? 1.5f : -1.5f; break;
      case Row::ties: x[i] = static_cast<float>(random.below(253) - 126) + 0.5f; break;
      case Row::subnormal: x[i] *= 0x1p-140f; break;
      case Row::tiny: x[i] *= 0x1p-99f; break;
      case Row::huge: x[i] *= 0x1p100f; break;
      case Row::wide: x[i] = std::ldexp(x[i], random.below(60) - 30); break;
      default: break;
    }
  }
  if (kind == Row::ties) x[at] = 127;
  if (kind == Row::nan) x[at] = std::bit_cast<float>(0x7fc00000u);
  if (kind == Row::infinite) x[at] = -__builtin_inff();
  return x;
}

// Finite halves of either sign, subnormal ones and zero among them.
inline std::vector<uint16_t> halves(size_t count, Random& random) {
  std::vector<uint16_t> all(count);
  for (uint16_t& h : all) {
    h = float_to_half(random.unit() * 0.01f);
    if (random.one_in(16)) h = static_cast<uint16_t>(random.below(0x400) | random.below(2) << 15);
  }
  return all;
}

// Query rows folded by the scalar kernel, one after the other.
struct Folded {
  std::vector<float> values, scale;
  std::vector<int8_t> codes;
  std::vector<int32_t> sums;
  int head_dim, groups;

  Folded(const Kernels& scalar, int rows, int head_dim, int groups, Random& random)
      : values(random.floats(static_cast<size_t>(rows) * head_dim, 8)),
        scale(rows),
        codes(values.size()),
        sums(static_cast<size_t>(rows) * groups),
        head_dim(head_dim),
        groups(groups) {
    for (int r = 0; r < rows; r++)
      scalar.fold_query(values.data() + r * head_dim, 0.2f, head_dim, groups,
                        codes.data() + r * head_dim, &scale[r], sums.data() + r * groups);
  }
  Queries view() const {
    return {values.data(), codes.data(), scale.data(), sums.data(), head_dim, 1, groups};
  }
};

}  // namespace kvsieve::test
