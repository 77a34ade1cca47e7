// Dense projections: y = x . W^T over panels of 16 output rows, one output per lane.
//
// A row of x gives the same bits alone or in a tile: per group of 32 inputs the dot product is an
// exact integer, and groups are added in order with one fused step each (two where an offset m is
// stored). So decode (one row) and prefill (tiles of rows) agree.
#pragma once

#include "kvsieve/kernels.h"

namespace kvsieve::KVSIEVE_TARGET {

// Rows of x that are multiplied with one panel before moving on: 64 rows of 1,536 codes are 96 KiB
// and stay in the second cache level while a stretch of panels passes.
constexpr int kRowBlock = 64;

// Groups ahead that one row asks for: 8 x 256 bytes of 4-bit codes. One row streams its weights,
// and the processor's own prefetch restarts at every 4 KiB and with each of three arrays: 20 to 24
// GB/s at 576 inputs, where plain reading gives 31 (Zen 4). 4 and 16 groups gain less; more rows
// compute longer than they wait.
constexpr int kGroupsAhead = 8;

// Into the second cache level: misses that wait in the first one's few slots hold up the loads.
static inline void ask_for(const void* p) { __builtin_prefetch(p, 0, 2); }

static inline void store_outputs(float* y, F sum, int lanes, bool add) {
  if (lanes == kPanel) {
    f_store(y, add ? f_load(y) + sum : sum);
  } else {
    f_store_first(y, add ? f_load_first(y, lanes) + sum : sum, lanes);
  }
}

template <int R>
static inline void store_tile(const WeightView& w, const F* acc, int row, int panel, float* y,
                              int y_stride, bool add) {
  const int lanes = w.rows - panel * kPanel < kPanel ? w.rows - panel * kPanel : kPanel;
  KVSIEVE_UNROLL
  for (int r = 0; r < R; r++)
    store_outputs(y + static_cast<size_t>(row + r) * y_stride + panel * kPanel, acc[r], lanes, add);
}

template <int R, bool kFourBit, bool kHasM>
static inline void quantized_tile(const WeightView& w, const Activations& x, int row, int panel,
                                  float* y, int y_stride, bool add) {
  const int groups = w.cols / kGroup;
  constexpr int kGroupBytes = kFourBit ? 256 : 512;
  const uint8_t* codes = w.codes + static_cast<size_t>(panel) * groups * kGroupBytes;
  const uint16_t* d = w.d + static_cast<size_t>(panel) * groups * kPanel;
  const uint16_t* m = kHasM ? w.m + static_cast<size_t>(panel) * groups * kPanel : nullptr;
  const int8_t* xc = x.codes + static_cast<size_t>(row) * x.cols;
  const size_t first_group = static_cast<size_t>(row) * groups;
  F acc[R];
  KVSIEVE_UNROLL
  for (int r = 0; r < R; r++) acc[r] = f_zero();
  for (int g = 0; g < groups; g++) {
    if constexpr (R == 1) {
      const int ahead = g + kGroupsAhead;
      for (int i = 0; i < kGroupBytes; i += 64) ask_for(codes + ahead * kGroupBytes + i);
      if (g % 2 == 0) {  // two groups' scales fill a line
        ask_for(d + (ahead + kGroupsAhead) * kPanel);
        if constexpr (kHasM) ask_for(m + (ahead + kGroupsAhead) * kPanel);
      }
    }
    B u[8];
    KVSIEVE_UNROLL
    for (int i = 0; i < (kFourBit ? 4 : 8); i++) u[i] = b_load(codes + g * kGroupBytes + i * 64);
    if constexpr (kFourBit) {
      KVSIEVE_UNROLL
      for (int i = 0; i < 4; i++) {
        u[i + 4] = b_high_nibbles(u[i]);
        u[i] = b_low_nibbles(u[i]);
      }
    }
    F scale = f_load_f16(d + g * kPanel);
    F offset = kHasM ? f_load_f16(m + g * kPanel) : f_zero();
    KVSIEVE_UNROLL
    for (int r = 0; r < R; r++) {
      const size_t at = first_group + static_cast<size_t>(r) * groups + g;
      const int8_t* c = xc + static_cast<size_t>(r) * x.cols + g * kGroup;
      // Two chains of sums: with one, the rows do not quite hide its latency (-5 % on Zen 4).
      I a = kHasM ? i_zero() : i_set1(-w.offset * x.codes_sum[at]), b = i_zero();
      KVSIEVE_UNROLL
      for (int i = 0; i < 8; i += 2) {
        if constexpr (kFourBit) {
          a = dot4_nibble(a, u[i], b_broadcast4(c + 4 * i));
          b = dot4_nibble(b, u[i + 1], b_broadcast4(c + 4 * i + 4));
        } else {
          a = dot4(a, u[i], b_broadcast4(c + 4 * i));
          b = dot4(b, u[i + 1], b_broadcast4(c + 4 * i + 4));
        }
      }
      acc[r] = f_fma(to_float(a + b), scale * f_set1(x.scale[at]), acc[r]);
      if constexpr (kHasM) acc[r] = f_fma(offset, f_set1(x.sum[at]), acc[r]);
    }
  }
  store_tile<R>(w, acc, row, panel, y, y_stride, add);
}

template <int R>
static inline void f32_tile(const WeightView& w, const Activations& x, int row, int panel, float* y,
                            int y_stride, bool add) {
  const float* values = w.values + static_cast<size_t>(panel) * w.cols * kPanel;
  F acc[R];
  KVSIEVE_UNROLL
  for (int r = 0; r < R; r++) acc[r] = f_zero();
  for (int i = 0; i < w.cols; i++) {
    F column = f_load(values + static_cast<size_t>(i) * kPanel);
    KVSIEVE_UNROLL
    for (int r = 0; r < R; r++)
      acc[r] = f_fma(column, f_set1(x.values[static_cast<size_t>(row + r) * x.cols + i]), acc[r]);
  }
  store_tile<R>(w, acc, row, panel, y, y_stride, add);
}

template <int R>
static inline void tile(const WeightView& w, const Activations& x, int row, int panel, float* y,
                        int y_stride, bool add) {
  if (w.kind == WeightKind::f32) return f32_tile<R>(w, x, row, panel, y, y_stride, add);
  if (w.kind == WeightKind::q8)
    return quantized_tile<R, false, false>(w, x, row, panel, y, y_stride, add);
  if (w.m) return quantized_tile<R, true, true>(w, x, row, panel, y, y_stride, add);
  return quantized_tile<R, true, false>(w, x, row, panel, y, y_stride, add);
}

static void project(const WeightView& w, const Activations& x, int rows, int panel_begin,
                    int panel_end, float* y, int y_stride, bool add) {
  for (int block = 0; block < rows; block += kRowBlock) {
    const int end = block + kRowBlock < rows ? block + kRowBlock : rows;
    for (int panel = panel_begin; panel < panel_end; panel++) {
      int row = block;
      for (; row + kDenseRows <= end; row += kDenseRows)
        tile<kDenseRows>(w, x, row, panel, y, y_stride, add);
      // What is left of a prompt, or a few sequences decoded together: rows in fours and twos
      // share the unpacking of the weights (SmolLM2-135M on two Zen 4 cores: four rows took 2.1
      // times as long as one, now 1.3).
      if constexpr (kDenseRows > 4)
        for (; row + 4 <= end; row += 4) tile<4>(w, x, row, panel, y, y_stride, add);
      if constexpr (kDenseRows > 2)
        for (; row + 2 <= end; row += 2) tile<2>(w, x, row, panel, y, y_stride, add);
      for (; row < end; row++) tile<1>(w, x, row, panel, y, y_stride, add);
    }
  }
}

}  // namespace kvsieve::KVSIEVE_TARGET
