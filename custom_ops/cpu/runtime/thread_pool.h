#pragma once
// The library's own threads: ops run on them through loops and never start threads themselves.
#include <cstdint>

#include "parallel_ranges.h"
#include "scratch.h"

namespace fdsd {

// Call body(i) for i in [0, num_tasks), each exactly once, on all threads: ParallelRanges of single tasks.
template <typename Body>
void ParallelFor(int64_t num_tasks, Body&& body) {
  ParallelRanges(num_tasks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) body(i);
  });
}

// Bytes of rows that a thread takes at a time: less would cost more to hand out than to do.
constexpr int64_t kRowTaskBytes = 16 << 10;

// Call body(row) for row in [0, num_rows), some neighbouring ones at a time. Few small rows stay on the calling thread.
//   row_bytes    what a row reads and writes, or costs in such bytes
template <typename Body>
void ParallelForRows(int64_t num_rows, int64_t row_bytes, Body&& body) {
  const int64_t rows_per_task = row_bytes >= kRowTaskBytes ? 1 : kRowTaskBytes / (row_bytes > 0 ? row_bytes : 1);
  ParallelRanges(
      num_rows, rows_per_task,
      [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) body(row);
      },
      row_bytes);
}

}  // namespace fdsd
