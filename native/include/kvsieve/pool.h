// A team of threads that runs one function together, with barriers inside it.
//
// Plain std::thread, so that no system OpenMP is needed. Work is taken from shared counters: which
// thread computes what changes from run to run, the results don't, because every item is computed
// from scratch and merged in item order.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace kvsieve {

class Team;

// What one thread of the team sees while a job runs.
class Worker {
 public:
  Worker(Team& team, int id) : team_(team), id_(id) {}
  int id() const { return id_; }
  bool is_first() const { return id_ == 0; }
  // Waits until all threads have arrived.
  void barrier();
  // Calls item(i) for i in [0, count), shared among the threads, `grain` at a time; then waits for
  // all.
  template <class Function>
  void share(int64_t count, int64_t grain, const Function& item);

 private:
  Team& team_;
  int id_;
  int phase_ = 0;
};

class Team {
 public:
  explicit Team(int threads);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return size_; }
  // Runs job on every thread of the team and returns when all have ended. `job` must not throw.
  void run(const std::function<void(Worker&)>& job);

 private:
  friend class Worker;
  static constexpr int kCounters = 3;  // the counter of a phase is reset two barriers later

  void wait_for_jobs(int id);

  const int size_;
  const int barrier_polls_;
  std::vector<std::thread> threads_;
  const std::function<void(Worker&)>* job_ = nullptr;
  bool stop_ = false;
  alignas(64) std::atomic<uint32_t> generation_{0};
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> barrier_phase_{0};
  struct alignas(64) Counter {
    std::atomic<int64_t> next{0};
  };
  Counter counters_[kCounters];
};

template <class Function>
void Worker::share(int64_t count, int64_t grain, const Function& item) {
  std::atomic<int64_t>& next = team_.counters_[phase_ % Team::kCounters].next;
  // Nobody can still be in phase_ - 2, so the counter of phase_ + 1 is free to be reset.
  if (is_first()) team_.counters_[(phase_ + 1) % Team::kCounters].next.store(0);
  for (;;) {
    const int64_t begin = next.fetch_add(grain);
    if (begin >= count) break;
    const int64_t end = begin + grain < count ? begin + grain : count;
    for (int64_t i = begin; i < end; i++) item(i);
  }
  phase_++;
  barrier();
}

}  // namespace kvsieve
