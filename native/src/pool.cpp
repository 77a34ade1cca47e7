#include "kvsieve/pool.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvsieve {

namespace {

// Polls this often before sleeping: a layer's phases are a few microseconds apart. With more
// threads than cores the one waited for may need this very core, so sleep soon.
constexpr int kBarrierPolls = 2000;
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
      barrier_polls_(threads > static_cast<int>(std::thread::hardware_concurrency())
                         ? kCrowdedPolls
                         : kBarrierPolls) {
  for (int id = 1; id < size_; id++) threads_.emplace_back([this, id] { wait_for_jobs(id); });
}

Team::~Team() {
  stop_ = true;
  generation_.fetch_add(1);
  generation_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void Team::run(const std::function<void(Worker&)>& job) {
  job_ = &job;
  for (Counter& counter : counters_) counter.next.store(0);
  if (size_ > 1) {
    generation_.fetch_add(1);
    generation_.notify_all();
  }
  Worker worker(*this, 0);
  job(worker);
  worker.barrier();
}

void Team::wait_for_jobs(int id) {
  uint32_t seen = 0;
  for (;;) {
    for (int poll = 0; poll < kIdlePolls && generation_.load() == seen; poll++) pause();
    generation_.wait(seen);
    seen = generation_.load();
    if (stop_) return;
    Worker worker(*this, id);
    (*job_)(worker);
    worker.barrier();
  }
}

void Worker::barrier() {
  if (team_.size_ == 1) return;
  const uint32_t phase = team_.barrier_phase_.load();
  if (team_.arrived_.fetch_add(1) + 1 == team_.size_) {
    team_.arrived_.store(0);
    team_.barrier_phase_.fetch_add(1);
    team_.barrier_phase_.notify_all();
    return;
  }
  for (int poll = 0; poll < team_.barrier_polls_; poll++) {
    if (team_.barrier_phase_.load() != phase) return;
    pause();
  }
  team_.barrier_phase_.wait(phase);
}

}  // namespace kvsieve
