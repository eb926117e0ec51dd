#include "stopped_threads.h"

#include <immintrin.h>
#include <time.h>

namespace fdsd {
namespace {

// A thread whose clock stands still for so many ticks of the processor's, 5-10 microseconds, is stopped.
constexpr uint64_t kStoppedTicks = 20'000;
// For so many jobs it keeps from the caller's processor: some tenths of a second of decoding.
constexpr uint32_t kApartJobs = 1u << 12;

// Nanoseconds for which a thread has computed; they stand still while another has its processor. -1 = cannot be told.
int64_t ComputedNs(pthread_t thread) {
  clockid_t clock;
  timespec time;
  if (pthread_getcpuclockid(thread, &clock) != 0 || clock_gettime(clock, &time) != 0) return -1;
  return int64_t{time.tv_sec} * 1'000'000'000 + time.tv_nsec;
}

}  // namespace

Processors::Processors() {
  CPU_ZERO(&all_);
  if (sched_getaffinity(0, sizeof(all_), &all_) != 0) CPU_SET(0, &all_);
}

bool Processors::MoveTo(pthread_t thread, int32_t processor) const {
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(processor, &one);
  return pthread_setaffinity_np(thread, sizeof(one), &one) == 0;
}

void Processors::KeepFrom(pthread_t thread, int32_t processor) const {
  cpu_set_t others = all_;
  CPU_CLR(processor, &others);
  pthread_setaffinity_np(thread, sizeof(others), CPU_COUNT(&others) > 0 ? &others : &all_);
}

void Processors::LetRunAnywhere(pthread_t thread) const { pthread_setaffinity_np(thread, sizeof(all_), &all_); }

bool StoppedThreads::Move(uint32_t job, int32_t num_threads, std::vector<ThreadCounters>* counters) {
  const auto is_working = [job](const State& state) { return state.working_on.load(std::memory_order_acquire) == job; };
  for (int32_t t = 1; t < num_threads; ++t) {
    State& state = states_[t];
    state.computed_ns = is_working(state) ? ComputedNs(state.handle.load(std::memory_order_relaxed)) : -1;
  }
  for (const uint64_t begin = __rdtsc(); __rdtsc() - begin < kStoppedTicks;) _mm_pause();
  bool is_any = false;
  for (int32_t t = 1; t < num_threads; ++t) {
    State& state = states_[t];
    if (state.computed_ns < 0 || !is_working(state)) continue;
    const pthread_t handle = state.handle.load(std::memory_order_relaxed);
    if (ComputedNs(handle) != state.computed_ns || !processors_.MoveTo(handle, sched_getcpu())) continue;
    state.must_sleep.store(true, std::memory_order_relaxed);
    (*counters)[t].moves.Add(1);
    state.moved_in = job;
    is_any = true;
    if (state.is_apart) continue;
    state.is_apart = true;
    state.apart_since = job;
    ++num_apart_;
  }
  return is_any;
}

void StoppedThreads::KeepApart(uint32_t job) {
  const int32_t here = sched_getcpu();
  for (State& state : states_) {
    if (!state.is_apart) continue;
    const pthread_t handle = state.handle.load(std::memory_order_relaxed);
    if (state.moved_in == job || state.apart_from != here) {
      processors_.KeepFrom(handle, here);
      state.apart_from = here;
      state.must_sleep.store(false, std::memory_order_relaxed);
    } else if (job - state.apart_since > kApartJobs) {
      processors_.LetRunAnywhere(handle);
      state.is_apart = false;
      --num_apart_;
    }
  }
}

}  // namespace fdsd
