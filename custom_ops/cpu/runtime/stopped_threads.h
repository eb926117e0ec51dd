#pragma once
// Threads that the system has stopped in the middle of a piece, and how they get on.
#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <cstdint>
#include <vector>

#include "thread_counters.h"

namespace fdsd {

// The processors that the calling thread may use.
class Processors {
 public:
  Processors();

  int32_t count() const { return CPU_COUNT(&all_); }

  // Let `thread` run on one processor only; it moves at once. Returns false where it may not.
  bool MoveTo(pthread_t thread, int32_t processor) const;

  // Let it run on all but one; on all where there is no other.
  void KeepFrom(pthread_t thread, int32_t processor) const;

  void LetRunAnywhere(pthread_t thread) const;

 private:
  cpu_set_t all_;
};

// A neighbour's turn on a processor is much longer than a piece. So a caller that waits for a piece whose thread was
// stopped would lose about as much as the neighbour takes, on its own processor too. Instead it moves the stopped
// thread there and sleeps: the thread ends its piece and sleeps. Afterwards the two keep apart for a while: else the
// system leaves them on one processor. Threads are told by number; 0 is the caller, which is never moved.
class StoppedThreads {
 public:
  explicit StoppedThreads(int32_t num_threads) : states_(static_cast<size_t>(num_threads)) {}

  // By thread `thread`, around what it does for a job.
  void Begin(int32_t thread, uint32_t job) {
    states_[thread].handle.store(pthread_self(), std::memory_order_relaxed);
    states_[thread].working_on.store(job, std::memory_order_release);
  }
  void End(int32_t thread) { states_[thread].working_on.store(kNothing, std::memory_order_relaxed); }

  // Whether it shall sleep after the piece that it runs.
  bool MustSleep(int32_t thread) const { return states_[thread].must_sleep.load(std::memory_order_relaxed); }

  // By the caller: move threads 1..num_threads - 1 that are stopped while they work on the job. Returns whether there
  // are any.
  bool Move(uint32_t job, int32_t num_threads, std::vector<ThreadCounters>* counters);

  // By the caller, after the job: those that were moved go back, and keep from the caller's processor for a while,
  // wherever the system moves it.
  void MoveBack(uint32_t job) {
    if (num_apart_ > 0) KeepApart(job);
  }

 private:
  static constexpr uint32_t kNothing = 1u << 31;  // no job's number

  struct alignas(64) State {
    std::atomic<pthread_t> handle{};
    std::atomic<uint32_t> working_on{kNothing};
    std::atomic<bool> must_sleep{false};
    // Of the caller:
    int64_t computed_ns = -1;  // when it was last looked at
    bool is_apart = false;     // it keeps from the caller's processor,
    int32_t apart_from = -1;   // which was this one,
    uint32_t apart_since = 0;  // since this job
    uint32_t moved_in = 0;     // the last job in which it was moved
  };

  void KeepApart(uint32_t job);

  const Processors processors_;
  std::vector<State> states_;
  int32_t num_apart_ = 0;
};

}  // namespace fdsd
