#pragma once
// Waiting for other processes over memory that is shared with them.
#include <emmintrin.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <limits>

namespace fdsd {

// How long a rank polls for others before it sleeps: longer than the difference between their steps. After the first
// part it yields between two polls, so that more ranks than cores get on.
constexpr int64_t kSpinNanoseconds = 50'000;
constexpr int64_t kPauseNanoseconds = 5'000;
constexpr int kLooksPerClock = 32;
// How long a rank sleeps at most before it checks again, for what no rank wakes it for.
constexpr int64_t kNapNanoseconds = 50'000'000;

inline int64_t MonotonicNs() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

// Sleep until the word is woken, unless it is no longer `seen`; at most so long, which is under a second.
inline void SharedNap(std::atomic<uint32_t>* word, uint32_t seen, int64_t nanoseconds) {
  const timespec nap{0, nanoseconds};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAIT, seen, &nap, nullptr, 0);
}

inline void SharedWakeAll(std::atomic<uint32_t>* word) {
  word->fetch_add(1);
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(word), FUTEX_WAKE, std::numeric_limits<int>::max(), nullptr, nullptr,
          0);
}

// Look until `is_over()` or the time has passed. Returns whether it is over.
template <typename IsOver>
bool Poll(int64_t nanoseconds, IsOver&& is_over) {
  const int64_t begin = MonotonicNs();
  for (int64_t elapsed = 0; elapsed < nanoseconds; elapsed = MonotonicNs() - begin) {
    for (int i = 0; i < kLooksPerClock; ++i) {
      _mm_pause();
      if (is_over()) return true;
    }
    if (elapsed > kPauseNanoseconds) sched_yield();
  }
  return false;
}

}  // namespace fdsd
