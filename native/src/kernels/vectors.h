// Selectors by vectors: scores of the 16 blocks of a record.
#pragma once

#include "../kernels/logits.h"
#include "kvsieve/kernels.h"

namespace kvsieve::KVSIEVE_TARGET {

template <int R>
static inline void vector_scores_rows(const uint8_t* record, const uint8_t* ahead, int vectors,
                                      int head_dim, const VectorQueries& q, int row, float* out,
                                      int stride) {
  const float* scales = reinterpret_cast<const float*>(record + vectors * head_dim * kIndexLanes);
  F total[R];
  for (int v = 0; v < vectors; v++) {
    const uint8_t* codes = record + static_cast<ptrdiff_t>(v) * head_dim * kIndexLanes;
    const ptrdiff_t first = static_cast<ptrdiff_t>(v) * kMaxRows + row;
    I a[R];
    KVSIEVE_UNROLL
    for (int r = 0; r < R; r++) a[r] = i_set1(q.offsets[first + r]);
    for (int c = 0; c < head_dim / 4; c++) {
      // One line with each load: in one burst they would fill the slots for misses.
      if (ahead) __builtin_prefetch(ahead + (codes - record) + c * 64, 0, 2);
      B k = b_load(codes + c * 64);
      KVSIEVE_UNROLL
      for (int r = 0; r < R; r++)
        a[r] = dot4(a[r], k, b_broadcast4(q.codes + (first + r) * head_dim + c * 4));
    }
    F scale = f_load(scales + v * kIndexLanes);
    KVSIEVE_UNROLL
    for (int r = 0; r < R; r++) {
      F part = to_float(a[r]) * (scale * f_set1(q.scale[(row + r) * q.scale_stride]));
      total[r] = v == 0 ? part : total[r] + part;
    }
  }
  KVSIEVE_UNROLL
  for (int r = 0; r < R; r++) f_store(out + static_cast<ptrdiff_t>(r) * stride, total[r]);
}

static void vector_scores(const uint8_t* record, const uint8_t* ahead, int vectors, int head_dim,
                          const VectorQueries& q, int rows, float* out, int out_stride) {
  by_rows(rows, [&]<int R>(int row) {
    vector_scores_rows<R>(record, row ? nullptr : ahead, vectors, head_dim, q, row,
                          out + static_cast<ptrdiff_t>(row) * out_stride, out_stride);
  });
}

}  // namespace kvsieve::KVSIEVE_TARGET
