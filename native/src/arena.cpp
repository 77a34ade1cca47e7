#include "kvsieve/arena.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <new>

namespace kvsieve {

namespace {

constexpr size_t kHugePage = size_t{2} << 20;
// Only what is used of a mapping becomes memory, so it can be generous.
constexpr size_t kMapping = size_t{64} << 20;
constexpr size_t kAlign = 64;

size_t round_up(size_t value, size_t to) { return (value + to - 1) / to * to; }

}  // namespace

Arena::~Arena() {
  for (const Mapping& mapping : mappings_) munmap(mapping.start, mapping.bytes);
}

void* Arena::allocate(size_t bytes) {
  bytes = round_up(bytes, kAlign);
  if (bytes > left_) {
    // One huge page more, so that an aligned stretch fits wherever the mapping begins.
    const size_t size = round_up(std::max(bytes, kMapping), kHugePage) + kHugePage;
    void* start = mmap(nullptr, size, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) throw std::bad_alloc();
    mappings_.push_back({start, size});
#if defined(MADV_HUGEPAGE)
    madvise(start, size, MADV_HUGEPAGE);  // a wish: without it everything works, more slowly
#endif
    const auto address = reinterpret_cast<uintptr_t>(start);
    next_ = reinterpret_cast<char*>(round_up(address, kHugePage));
    left_ = size - static_cast<size_t>(reinterpret_cast<uintptr_t>(next_) - address);
  }
  void* result = next_;
  next_ += bytes;
  left_ -= bytes;
  return result;
}

}  // namespace kvsieve
