#pragma once
// The rows of a step on all threads, each by itself, where a row may need memory.
#include <atomic>
#include <cstdint>
#include <new>

#include "thread_pool.h"

namespace fdsd {

// Call body(row) for row in [0, num_rows). Throws std::bad_alloc, when all are through, if a row did.
template <typename Body>
void ForEachRow(int32_t num_rows, Body&& body) {
  std::atomic<bool> is_out_of_memory{false};
  ParallelFor(num_rows, [&](int64_t r) {
    try {
      body(static_cast<int32_t>(r));
    } catch (const std::bad_alloc&) {
      is_out_of_memory.store(true, std::memory_order_relaxed);
    }
  });
  if (is_out_of_memory.load(std::memory_order_relaxed)) throw std::bad_alloc();
}

}  // namespace fdsd
