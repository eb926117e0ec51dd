#pragma once
// The library's own threads: ops run on them through ParallelFor and never start threads themselves.
#include <cstdint>
#include <type_traits>

namespace fdsd {

// Call body(context, i) for i in [0, num_tasks), each exactly once, on all threads; returns when all are done.
// Tasks are handed out dynamically, so no result may depend on which thread runs one or in which order.
// A call from inside a task runs its tasks on the calling thread.
void ParallelForRaw(int64_t num_tasks, void (*body)(void* context, int64_t i), void* context);

template <typename Body>
void ParallelFor(int64_t num_tasks, Body&& body) {
  using Plain = std::remove_reference_t<Body>;
  ParallelForRaw(
      num_tasks, [](void* context, int64_t i) { (*static_cast<Plain*>(context))(i); },
      const_cast<void*>(static_cast<const void*>(&body)));
}

// Bytes of rows that a thread takes at a time: less would cost more to hand out than to do.
constexpr int64_t kRowTaskBytes = 16 << 10;

// Call body(row) for row in [0, num_rows), some neighbouring ones at a time. Few small rows stay on the calling thread.
//   row_bytes    what a row reads and writes, or costs in such bytes
template <typename Body>
void ParallelForRows(int64_t num_rows, int64_t row_bytes, Body&& body) {
  const int64_t rows_per_task = row_bytes >= kRowTaskBytes ? 1 : kRowTaskBytes / (row_bytes > 0 ? row_bytes : 1);
  ParallelFor((num_rows + rows_per_task - 1) / rows_per_task, [&](int64_t task) {
    const int64_t begin = task * rows_per_task;
    const int64_t end = begin + rows_per_task < num_rows ? begin + rows_per_task : num_rows;
    for (int64_t row = begin; row < end; ++row) body(row);
  });
}

// Scratch memory of the calling thread, 64-byte aligned, grown on demand and kept; valid until the thread's next call
// for the same use. What one op holds at the same time is for different uses:
enum class Scratch : int {
  kOp,         // of the calling thread, for the whole op: plans, packed rows, sums
  kRows,       // likewise, rows beside kOp
  kTask,       // of a thread, for a task
  kInner,      // of the calling thread, for what an op hands to a part shared with other ops
  kInnerTask,  // of a thread, beside kTask
  kRanges,     // ParallelRanges' own
  kCount
};
void* ScratchBytes(Scratch use, int64_t num_bytes);

template <typename T>
T* ScratchArray(Scratch use, int64_t count) {
  return static_cast<T*>(ScratchBytes(use, count * static_cast<int64_t>(sizeof(T))));
}

}  // namespace fdsd
