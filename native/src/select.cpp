#include "kvsieve/select.h"

#include <algorithm>
#include <cstring>

namespace kvsieve {

namespace {

bool left_out(float value) { return value == -__builtin_inff(); }
bool left_out(int64_t) { return false; }

// Marks the `want` best blocks that are not taken, best first by value, then by lower index.
// Returns the worst of those it took, or -1.
template <class Value>
int take_best(const Value* value, int count, int want, PickScratch scratch) {
  // What the first of two levels left out comes last, and is looked at only if there is need.
  int free = 0;
  for (int b = 0; b < count; b++)
    if (!scratch.taken[b] && !left_out(value[b])) scratch.order[free++] = b;
  for (int b = 0; b < count && free < want; b++)
    if (!scratch.taken[b] && left_out(value[b])) scratch.order[free++] = b;
  want = std::min(want, free);
  if (want <= 0) return -1;
  auto better = [&](int32_t a, int32_t b) {
    return value[a] > value[b] || (value[a] == value[b] && a < b);
  };
  std::nth_element(scratch.order, scratch.order + want - 1, scratch.order + free, better);
  for (int i = 0; i < want; i++) scratch.taken[scratch.order[i]] = 1;
  return scratch.order[want - 1];
}

}  // namespace

void pick_guarded(const float* scores, int count, int k, bool neighbour_first,
                  PickScratch scratch) {
  std::memset(scratch.taken, 0, count);
  int places = k;
  const int second = neighbour_first ? count - 2 : 0, third = neighbour_first ? 0 : count - 2;
  for (int guard : {count - 1, second, third}) {
    if (places == 0 || guard < 0 || scratch.taken[guard]) continue;
    scratch.taken[guard] = 1;
    places--;
  }
  take_best(scores, count, places, scratch);
}

void pick_ends(const float* scores, int count, int k, PickScratch scratch) {
  std::memset(scratch.taken, 0, count);
  scratch.taken[0] = scratch.taken[count - 1] = 1;
  take_best(scores, count, k - (count > 1 ? 2 : 1), scratch);
}

void pick_probe(const float* scores, const int64_t* importance, int count, int k,
                PickScratch scratch) {
  std::memset(scratch.taken, 0, count);
  int reserved = 0;
  if (importance) {
    reserved = std::min((k + 1) / 2, count);
    take_best(importance, count, reserved, scratch);
  }
  const int worst = take_best(scores, count, k - reserved, scratch);
  if (!scratch.taken[count - 1] && worst >= 0) {
    scratch.taken[worst] = 0;
    scratch.taken[count - 1] = 1;
  }
}

void merge_row(const float* scores, int count, int counted, bool first, float* merged) {
  float top = scores[0];
  for (int b = 1; b < counted; b++) top = scores[b] > top ? scores[b] : top;
  for (int b = 0; b < count; b++) {
    const float value = scores[b] - top;
    merged[b] = first || value > merged[b] ? value : merged[b];
  }
}

}  // namespace kvsieve
