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

// Clears `taken`, marks the guards that fit, and returns the places left.
int take_guards(int count, int k, bool neighbour_first, PickScratch scratch) {
  std::memset(scratch.taken, 0, count);
  const int second = neighbour_first ? count - 2 : 0, third = neighbour_first ? 0 : count - 2;
  for (int guard : {count - 1, second, third}) {
    if (k == 0 || guard < 0 || scratch.taken[guard]) continue;
    scratch.taken[guard] = 1;
    k--;
  }
  return k;
}

}  // namespace

void pick_guarded(const float* scores, int count, int k, bool neighbour_first,
                  PickScratch scratch) {
  take_best(scores, count, take_guards(count, k, neighbour_first, scratch), scratch);
}

void pick_mass(const float* shares, int count, float mass, int k_min, int k, bool neighbour_first,
               PickScratch scratch) {
  int places = take_guards(count, k, neighbour_first, scratch), free = 0;
  float reached = 0;
  for (int b = 0; b < count; b++) {
    if (scratch.taken[b])
      reached += shares[b];
    else
      scratch.order[free++] = b;
  }
  int taken = k - places;
  std::sort(scratch.order, scratch.order + free, [&](int32_t a, int32_t b) {
    return shares[a] > shares[b] || (shares[a] == shares[b] && a < b);
  });
  for (int i = 0; i < free && places > 0 && (taken < k_min || reached < mass); i++) {
    scratch.taken[scratch.order[i]] = 1;
    reached += shares[scratch.order[i]];
    places--;
    taken++;
  }
}

void pick_candidates(const float* shares, int count, int count_taken, int margin,
                     PickScratch scratch) {
  const int certain = count_taken - margin;
  take_best(shares, count, take_guards(count, certain, false, scratch), scratch);
  for (int b = 0; b < count; b++) scratch.taken[b] *= 2;
  take_best(shares, count, margin, scratch);
}

void pick_window(int count, int k, PickScratch scratch) {
  for (int b = 0; b < count; b++) scratch.taken[b] = b >= count - k;
  if (k > 1 && k < count) {
    scratch.taken[count - k] = 0;
    scratch.taken[0] = 1;
  }
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
