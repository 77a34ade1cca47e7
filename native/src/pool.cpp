#include "kvsieve/pool.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvsieve {

namespace {

// Polls this often before sleeping: a layer's phases are a few microseconds apart. With more
// threads than cores the one waited for may need this very core, so sleep soon.
constexpr int kPolls = 2000;
constexpr int kCrowdedPolls = 20;
// Between two layers Python runs for about a microsecond, between two tokens for some ten.
constexpr int kIdlePolls = 20000;

inline void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace

Team::Team(int threads)
    : size_(threads),
      polls_(threads > static_cast<int>(std::thread::hardware_concurrency()) ? kCrowdedPolls
                                                                             : kPolls) {
  for (int id = 1; id < size_; id++) threads_.emplace_back([this, id] { wait_for_jobs(id); });
}

Team::~Team() {
  stop_ = true;
  generation_.fetch_add(1);
  generation_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void Team::run(int phases, const std::function<void(Worker&)>& job) {
  if (phases > num_phases_) {
    phases_ = std::make_unique<Phase[]>(phases);
    num_phases_ = phases;
  }
  for (int i = 0; i < phases; i++) {
    phases_[i].next.store(0, std::memory_order_relaxed);
    phases_[i].done.store(0, std::memory_order_relaxed);
  }
  job_ = &job;
  if (size_ > 1) {
    open_.store(true);
    generation_.fetch_add(1);
    generation_.notify_all();
  }
  Worker worker(*this, 0);
  job(worker);
  // Nobody may enter from here on, and whoever is inside must leave before `job` goes away.
  open_.store(false);
  wait_for(inside_, 0);
}

void Team::wait_for_jobs(int id) {
  uint32_t seen = 0;
  for (;;) {
    for (int poll = 0; poll < kIdlePolls && generation_.load() == seen; poll++) pause();
    generation_.wait(seen);
    seen = generation_.load();
    if (stop_) return;
    inside_.fetch_add(1);
    if (open_.load()) {
      Worker worker(*this, id);
      (*job_)(worker);
    }
    if (inside_.fetch_sub(1) == 1) inside_.notify_all();
  }
}

void Team::wait_for(std::atomic<int32_t>& value, int32_t wanted) const {
  for (int poll = 0; poll < polls_; poll++) {
    if (value.load() == wanted) return;
    pause();
  }
  for (int32_t now = value.load(); now != wanted; now = value.load()) value.wait(now);
}

}  // namespace kvsieve
