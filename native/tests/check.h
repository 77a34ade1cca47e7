// What the parity checks share: comparing bits, and saying where they first differ.
#pragma once

#include <bit>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

#include "kvsieve/kernels.h"

namespace kvsieve::test {

// The results of one kernel, compared case by case.
class Check {
 public:
  explicit Check(const char* kernel) : kernel_(kernel) {}
  template <class T>
  void same(const T* got, const T* expected, size_t count, const std::string& where) {
    cases_++;
    const auto* bytes = reinterpret_cast<const unsigned char*>(expected);
    for (size_t i = 0; i < count * sizeof(T); i++) digest_ = (digest_ ^ bytes[i]) * 16777619;
    if (std::memcmp(got, expected, count * sizeof(T)) == 0) return;
    if (different_++) return;
    size_t i = 0;
    while (std::memcmp(got + i, expected + i, sizeof(T)) == 0) i++;
    first_ = where + ", element " + std::to_string(i) + ": expected " + text(expected[i]) +
             ", got " + text(got[i]);
  }
  template <class T>
  void same(const std::vector<T>& got, const std::vector<T>& expected, const std::string& where) {
    same(got.data(), expected.data(), expected.size(), where);
  }
  // Prints the kernel's line. The digest is that of the expected results: equal on every machine.
  bool report(const char* isa) const {
    std::printf("%-14s %-16s %6d cases  %08x  %s\n", isa, kernel_, cases_, digest_,
                different_ == 0 ? "same bits" : "DIFFERENT");
    if (different_) std::printf("  %d of %d; the first: %s\n", different_, cases_, first_.c_str());
    return different_ == 0 && cases_ > 0;
  }

 private:
  template <class T>
  static std::string text(T value) {
    if constexpr (std::is_same_v<T, float>) {
      char all[64];
      std::snprintf(all, sizeof all, "%.9g (%08x)", value, std::bit_cast<uint32_t>(value));
      return all;
    } else {
      return std::to_string(value);
    }
  }
  const char* kernel_;
  int cases_ = 0, different_ = 0;
  uint32_t digest_ = 2166136261;  // FNV-1a
  std::string first_;
};

inline std::string name(const char* what, int value) {
  return std::string(what) + ' ' + std::to_string(value);
}

// The kernels under test, and the scalar ones.
struct Pair {
  const Kernels &got, &expected;
};

// Each runs one kernel on all its cases, prints a line, and returns whether every bit was equal.
bool check_project(Pair kernels);
bool check_quantize_row(Pair kernels);
bool check_rms_norm(Pair kernels);
bool check_silu_mul(Pair kernels);
bool check_gelu_mul(Pair kernels);
bool check_rope(Pair kernels);
bool check_exp(Pair kernels);
bool check_append(Pair kernels);
bool check_fold_query(Pair kernels);
bool check_page_logits(Pair kernels);
bool check_index_scores(Pair kernels);
bool check_vector_scores(Pair kernels);
bool check_anchor_logits(Pair kernels);
bool check_block_masses(Pair kernels);
bool check_exact_masses(Pair kernels);
bool check_add_shares(Pair kernels);
bool check_attend_run(Pair kernels);
bool check_merge_and_finish(Pair kernels);
bool check_add_importance(Pair kernels);

}  // namespace kvsieve::test
