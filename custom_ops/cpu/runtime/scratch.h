#pragma once
// Memory that ops need while they run.
#include <cstdint>

namespace fdsd {

// Scratch memory of the calling thread, 64-byte aligned, grown on demand and kept; valid until the thread's next call
// for the same use. What one op holds at the same time is for different uses:
enum class Scratch : int {
  kOp,         // of the calling thread, for the whole op: plans, packed rows, sums
  kRows,       // likewise, for rows, while kOp is in use
  kTask,       // of a thread, for a task
  kInner,      // of the calling thread, for what an op hands to a part shared with other ops
  kInnerTask,  // of a thread, while kTask is in use
  kGathered,   // of a thread, while both are in use: what a task has gathered from memory that lies apart
  kValues,     // of a thread, while all these are in use: values that a task has made of keys
  kCount
};
void* ScratchBytes(Scratch use, int64_t num_bytes);

template <typename T>
T* ScratchArray(Scratch use, int64_t count) {
  return static_cast<T*>(ScratchBytes(use, count * static_cast<int64_t>(sizeof(T))));
}

}  // namespace fdsd
