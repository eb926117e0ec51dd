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

// Scratch memory of the calling thread, 64-byte aligned, grown on demand and kept; valid until the thread's next call
// with the same slot. Slots let an op and the op it calls (moe_ffn -> linear) hold buffers at the same time.
enum class Scratch : int { kOp, kRows, kTask, kInner, kInnerTask, kCount };
void* ScratchBytes(Scratch slot, int64_t num_bytes);

template <typename T>
T* ScratchArray(Scratch slot, int64_t count) {
  return static_cast<T*>(ScratchBytes(slot, count * static_cast<int64_t>(sizeof(T))));
}

}  // namespace fdsd
