// Gathers one instruction set's kernels into its table. Included last by each simd/target_*.cpp.
#pragma once

#include "../kernels/elementwise.h"
// These use f_exp and the lane types above.
#include "../kernels/anchors.h"
#include "../kernels/attend.h"
#include "../kernels/cache.h"
#include "../kernels/dense.h"
#include "../kernels/vectors.h"

namespace kvsieve::KVSIEVE_TARGET {

static const Kernels kTable = {
    .name = KVSIEVE_TARGET_NAME,
    .project = project,
    .quantize_row = quantize_row,
    .rms_norm = rms_norm,
    .silu_mul = silu_mul,
    .gelu_mul = gelu_mul,
    .rope = rope,
    .append = append,
    .fold_query = fold_query,
    .page_logits = page_logits,
    .index_scores = index_scores,
    .vector_scores = vector_scores,
    .anchor_logits = anchor_logits,
    .block_masses = block_masses,
    .exact_masses = exact_masses,
    .add_shares = add_shares,
    .attend_run = attend_run,
    .merge = merge,
    .finish = finish,
    .add_importance = add_importance,
    .exp = exp_one,
};

}  // namespace kvsieve::KVSIEVE_TARGET
