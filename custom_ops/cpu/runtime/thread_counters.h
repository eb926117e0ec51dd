#pragma once
// What the threads have done since they were started: how often they met, and how evenly the work fell on them.
#include <atomic>
#include <cstdint>

#include "fdsd/runtime.h"

namespace fdsd {

// Written by one thread, read by any.
class Counter {
 public:
  void Add(int64_t n) { value_.store(value_.load(std::memory_order_relaxed) + n, std::memory_order_relaxed); }
  int64_t value() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<int64_t> value_{0};
};

// Of one thread.
struct alignas(64) ThreadCounters {
  Counter pieces;
  Counter stolen;  // of them
  Counter bytes;   // read by pieces whose loop says how many
  Counter moves;   // to the caller's processor, stopped in a piece
  Counter sleeps;
};

}  // namespace fdsd
