// A team of threads that runs one function together, phase by phase.
//
// Plain std::thread, so that no system OpenMP is needed. A phase ends when its items are done, not
// when every thread has arrived: a thread that the system has put aside delays nobody unless it
// holds an item. Which thread computes what changes from run to run; results don't, because every
// item is computed from scratch and merged in item order.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

namespace kvsieve {

class Team;

// What one thread of the team sees while a job runs.
class Worker {
 public:
  Worker(Team& team, int id) : team_(team), id_(id) {}
  int id() const { return id_; }
  // True on the thread that called Team::run, which always takes part.
  bool is_caller() const { return id_ == 0; }
  // Calls item(i) for i in [0, count), `grain` at a time, on whichever threads are there; returns
  // when all items are done. Every thread of a job makes the same calls in the same order.
  template <class Function>
  void share(int64_t count, int grain, const Function& item);

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
  // Runs job on this thread and on those of the team that come in time. It calls share at most
  // `phases` times and must not throw.
  void run(int phases, const std::function<void(Worker&)>& job);

 private:
  friend class Worker;
  struct alignas(64) Phase {
    std::atomic<int32_t> next, done;
  };

  void wait_for_jobs(int id);
  void wait_for(std::atomic<int32_t>& value, int32_t wanted) const;

  const int size_;
  const int polls_;
  std::vector<std::thread> threads_;
  std::unique_ptr<Phase[]> phases_;
  int num_phases_ = 0;
  const std::function<void(Worker&)>* job_ = nullptr;
  std::atomic<bool> stop_{false};
  alignas(64) std::atomic<uint32_t> generation_{0};
  alignas(64) std::atomic<bool> open_{false};
  alignas(64) std::atomic<int32_t> inside_{0};
};

template <class Function>
void Worker::share(int64_t count, int grain, const Function& item) {
  Team::Phase& phase = team_.phases_[phase_++];
  const int32_t total = static_cast<int32_t>(count);
  int32_t mine = 0;
  for (;;) {
    // A look first: `next` must not run away while late threads pass by.
    if (phase.next.load(std::memory_order_relaxed) >= total) break;
    const int32_t begin = phase.next.fetch_add(grain, std::memory_order_relaxed);
    if (begin >= total) break;
    const int32_t end = begin + grain < total ? begin + grain : total;
    for (int32_t i = begin; i < end; i++) item(i);
    mine += end - begin;
  }
  if (mine && phase.done.fetch_add(mine) + mine == total) phase.done.notify_all();
  team_.wait_for(phase.done, total);
}

}  // namespace kvsieve
