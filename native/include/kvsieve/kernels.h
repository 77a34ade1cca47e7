// The table of kernels that every instruction set fills, and the plain values they take.
//
// One arithmetic on every instruction set: 16 lanes, integer dot products, float reductions in one
// fixed order, fused operations written out. So a result has the same bits whether it was computed
// with AVX-512, AVX2 or scalar code, alone or beside other rows.
#pragma once

#include <cstddef>
#include <cstdint>

// Before a loop over rows or vectors whose count is a template constant: sums must stay in
// registers. Left alone, GCC 12 keeps the loop over rows and its sums in memory.
#if defined(__clang__)
#define KVSIEVE_UNROLL _Pragma("unroll")
#else
#define KVSIEVE_UNROLL _Pragma("GCC unroll 16")
#endif

namespace kvsieve {

constexpr int kBlock = 32;      // tokens per cache page: 2 vectors of 16 lanes
constexpr int kGroup = 32;      // values that share a scale in weights, activations and q4 pages
constexpr int kPanel = 16;      // output rows per weight panel: one per lane
constexpr int kRunBlocks = 16;  // listed blocks per attention run; one page maximum per lane
constexpr int kRunTokens = kRunBlocks * kBlock;
constexpr int kMaxRows = 8;  // query rows that share the loads of a page (registers: 2 sums each)
constexpr int kMaxHeadDim = 512;
constexpr int kMaxScaleGroups = kMaxHeadDim / kGroup;
constexpr int kAnchors = 2;  // keys of a block that stand for themselves in its record
constexpr int kAnchorVectors = kAnchors + 1;  // and the mean of the others
constexpr int kAnchorBands = 4;               // runs of channels with a spread of their own
constexpr int kVectors = 2;                   // at most, of a block in an index of vectors
constexpr int kIndexLanes = 16;  // selection blocks per group of the packed index: one per lane

enum class WeightKind : int { f32 = 0, q4 = 1, q8 = 2 };
enum class CacheType : int { f32 = 0, f16 = 1, q8 = 2, q4 = 3 };

// A packed matrix [rows, cols]. q4: per (panel, group) 4 vectors of 64 bytes, vector i holding, per
// row, the low nibbles of inputs 4i.. and the high nibbles of inputs 16+4i..; q8: 8 vectors, vector
// i holding inputs 4i..4i+3, stored +128. d, m: f16 [panel][group][16]; w = d * (code - offset) +
// m. f32: [panel][cols][16].
struct WeightView {
  WeightKind kind;
  int rows, cols;
  int offset;  // 8, 128 or 0
  const uint8_t* codes;
  const uint16_t* d;
  const uint16_t* m;  // null where no offset is stored
  const float* values;
};

// Activations, row-major: values (f32), and codes (int8) with one scale, sum and scaled sum per 32.
struct Activations {
  float* values;  // [rows][cols]
  int8_t* codes;  // [rows][cols]
  float* scale;   // [rows][cols / 32]
  float* sum;     // scale * sum of codes
  int32_t* codes_sum;
  int cols;
};

// Where the parts of a cache page lie; the twin of kernels/layout.py.
struct PageLayout {
  CacheType k_type, v_type;
  int head_dim;
  size_t k_scale, v, v_scale, bytes;
  int k_groups() const { return k_type == CacheType::q4 ? head_dim / kGroup : 1; }
  int v_groups() const { return v_type == CacheType::q4 ? head_dim / kGroup : 1; }
};

// Query rows. Integer keys read codes/scale/codes_sum, float keys read values; strides in elements.
struct Queries {
  const float* values;
  const int8_t* codes;
  const float* scale;
  const int32_t* codes_sum;  // [row][k_groups]
  int stride, scale_stride, sum_stride;
};

// What the index of anchors needs of a query row: -128 times the sum of its codes, and kSpreadGain
// times its squared length per band.
struct AnchorRow {
  int32_t offset;
  float energy[kAnchorBands];
};

// What an index of vectors needs of up to kMaxRows query rows: each vector meets codes of its own.
struct VectorQueries {
  const int8_t* codes;     // [vector][kMaxRows][head_dim]
  const int32_t* offsets;  // [vector][kMaxRows]: -128 times the sum of the codes
  const float* scale;
  int scale_stride;
};

// One run of listed pages for up to kMaxRows query rows; writes each row's (o, m, s) from scratch.
struct RunArgs {
  const PageLayout* layout;
  const uint8_t* const* pages;
  const int* blocks;  // block number of each page
  int num_pages;      // 1..kRunBlocks
  // Pages come from memory, not from a cache: ask for them ahead. `next` are the pages of the run
  // that this thread computes after this one, null if unknown.
  bool cold;
  const uint8_t* const* next;
  int num_next;
  Queries q;
  int rows;
  const int* visible;  // tokens of the sequence that row r sees
  float* logits;       // [rows][kRunTokens]: left holding exp(logit - m)
  uint8_t* codes;      // scratch [rows][v_groups][kRunTokens]
  float* o;            // [rows][head_dim]
  float* m;
  float* s;
  int window = 0;  // a row sees only the last `window` of its visible tokens; 0: all
};

struct Kernels {
  const char* name;
  // y[rows, kPanel * panels] = (or +=) x . W^T for panels [panel_begin, panel_end).
  void (*project)(const WeightView& w, const Activations& x, int rows, int panel_begin,
                  int panel_end, float* y, int y_stride, bool add);
  // Groups [begin, end) of a row's values to codes. False on NaN or infinity.
  bool (*quantize_row)(const Activations& x, int row, int begin, int end);
  void (*rms_norm)(const float* x, const float* weight, float eps, int n, float* y);
  void (*silu_mul)(const float* gate, const float* up, int n, float* y);
  void (*gelu_mul)(const float* gate, const float* up, int n, float* y);
  void (*rope)(float* x, const float* cos, const float* sin, int rope_dim, bool interleaved);
  // Writes token `slot` of a page; returns false on NaN, infinity, or what its type cannot hold.
  bool (*append)(const PageLayout& layout, uint8_t* page, int slot, const float* k, const float* v);
  // Folds `scale` into q and quantises it as an integer key side wants; returns false on NaN.
  bool (*fold_query)(float* q, float scale, int head_dim, int groups, int8_t* codes, float* q_scale,
                     int32_t* codes_sum);
  // Logits of all 32 tokens of a page: out[row * out_stride + token]; tokens past the end are
  // garbage.
  void (*page_logits)(const PageLayout& layout, const uint8_t* page, const Queries& q, int rows,
                      float* out, int out_stride);
  // Best logit of each of 16 blocks over every `step`th of their index entries:
  // out[row * out_stride + lane]. Asks for the record `ahead` meanwhile, unless it is null.
  void (*index_scores)(const uint8_t* record, const uint8_t* ahead, int entries, int step,
                       int head_dim, const Queries& q, int rows, float* out, int out_stride);
  // Scores of 16 blocks: the sum over a record's `vectors` of each one's dot product with the row's
  // codes for it: out[row * out_stride + lane]. Asks for the record `ahead`, unless it is null.
  void (*vector_scores)(const uint8_t* record, const uint8_t* ahead, int vectors, int head_dim,
                        const VectorQueries& q, int rows, float* out, int out_stride);
  // Logits of 16 blocks' anchors and means: out[vector * vector_stride + row * stride + lane].
  void (*anchor_logits)(const uint8_t* record, int head_dim, const Queries& q,
                        const AnchorRow* about, int rows, float* out, int stride,
                        int vector_stride);
  // Mass of each of `indexed` blocks, and of the two behind them from `recent` [64], of which
  // `num_recent` logits count; in units of exp(returned maximum). Logits are overwritten.
  float (*block_masses)(float* logits, int vector_stride, int indexed, float* recent,
                        int num_recent, float* masses);
  // Mass of each of `pages` blocks from their logits [page][32], in units of exp(returned maximum),
  // which is at least `top`.
  float (*exact_masses)(const float* logits, int pages, float top, float* masses);
  // shares[b] = the larger of itself and masses[b] as a share of their sum; their sum with `add`.
  // Up to a multiple of 16 is written.
  void (*add_shares)(const float* masses, int count, bool add, float* shares);
  void (*attend_run)(const RunArgs& args);
  // (o, m, s) <- merge of itself and a later run's; m == -inf means "nothing seen".
  void (*merge)(float* o, float* m, float* s, const float* o2, float m2, float s2, int head_dim);
  void (*finish)(float* o, float s, int head_dim);
  // acc[i] += rint(p[i] * factor * 2^24)
  void (*add_importance)(const float* p, float factor, int n, int32_t* acc);
  float (*exp)(float x);
};

struct IsaInfo {
  const char* name;
  const Kernels* kernels;  // null: not built for this architecture
  bool supported;          // by this processor and its system
};

// Best first.
const IsaInfo* isa_list(int* count);

}  // namespace kvsieve
