// What the records of the selector index are made of: keys as floats, and q8 rows in lanes.
#pragma once

#include "kvsieve/segment.h"

namespace kvsieve {

// One token's key as floats, whatever its type.
void read_key(const Segment& s, const uint8_t* page, int slot, float* key);

// As a q8 row: scale = max|x| / 127, code = rint(x / scale), stored +128. Returns the scale.
float quantize_row(const float* x, int n, uint8_t* codes);

// The same, rounded so that no code * scale is below x (`up`), or none above it. The scale is the
// next float where 127 of it would fall short of the largest.
float quantize_outward(const float* x, int n, bool up, uint8_t* codes);

// A row's codes into one of the 16 lanes of a record's vector.
void store_lane(const uint8_t* codes, int n, int lane, uint8_t* vector);

}  // namespace kvsieve
